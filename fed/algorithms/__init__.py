"""A folder per family of algorithms, named as its paper. This page is the protocol;
`baselines/gradient_descent.py` is the smallest algorithm.

An algorithm is a frozen dataclass of hyper-parameters with `@register` and a few pure functions:

    @register
    @dataclass(frozen=True)
    class MyMethod(Algorithm):
        '''One line that `fed list` shows.'''
        name, paper, sends = "my-method", "Author: Title, Algorithm 1", "K of d values up, d down"
        gamma: float | None = None                       # None: from theory, in prepare
        def prepare(self, constants): ...                # -> replace(self, gamma=...)
        def server_init(self, x0, turn): ...             # -> State, default {"x": x0}
        def client_init(self, problem, turn): ...        # -> State, one row per client, default {}
        def cohort(self, server, turn): ...              # client numbers, default all; see sample()
        def listeners(self, server, turn): ...           # receive but do not reply, default nobody
        def broadcast(self, server, turn): ...           # -> Message, default {"x": server["x"]}
        def listen(self, client, received, turn): ...    # every recipient, before the cohort works
        def client_step(self, client, received, problem, turn): ...   # -> State, Message up
        def server_step(self, server, replies, turn): ...             # -> State
        def model(self, server): ...                     # [d], evaluated; default server["x"]
        def personal_models(self, server, client, problem): ...       # [C, d] or None
        def metrics(self, server, client): ...           # extra numbers for the history

Across machines (`remote/server.py`, `remote/client.py`) it also needs to say what a reply looks
like: the class attribute `replies = ("g",)` for fields that are vectors like the model, else
`reply_like`. What must not leave the simulation says so in `check_across_machines`. If a client's
state follows from the messages, `memory` and `follow` let the server keep a copy for a client that
loses its disk. `server_step` must work with the replies of a part of the cohort (or
`needs_everyone`) and raise a SympruneError when a reply contradicts itself.

A turn of the engine calls them in this order; a turn is one message to and one from each client of
the cohort. State is `dict[str, Tensor]`: the server's, and the clients' with a row per client.
Never change a tensor in place that you were given. The keys of a state stay the same for the whole
run. Client functions see a stack `[C, ...]` of any C (1 on a client's own machine): write them by
row, use `problem.gradient(w [C, d])`, `problem.batch(stream, size)`, `problem.epoch(stream, size)`.

A message is `dict[str, Tensor | Sent]`. Down: a tensor goes to everyone, `Sent(t, each=True)` row
by row. Up: always row by row. `Sent(..., bits=)` is the paper's own count, `Sent([t0, t1, ...])` is
ragged. The receiver always sees rows. The payload picks dense, index or mask form by itself.

Randomness: `turn.stream("purpose")` has a row per client, `turn.shared("purpose")` is known to the
server and all clients without being sent. Nothing else may be random, nothing may be kept outside
the states: then checkpoints, chunks of clients and other machines give the same bits for free.

Bases that save lines, for every family: `protocol.SampledClients` (option cohort_size), and in
`shared/` `local_steps.LocalSteps` (gamma, p, batch), `local_epochs.LocalEpochs` (epochs of SGD),
`control_variates.ControlVariates` (an h_i per client), `first_sketch.FirstSketch` (clients describe
themselves first). Within one family: `fedspa/personal_masks.PersonalMasks` (a mask per client),
`fedp3/fedp3.OwnLayers` (layers per client), `fedsparse/em.EMMethod` (epochs towards a prior),
`cohort_squeeze/cohorts.CohortMethod` (K rounds). `protocol.LayeredModel` is for algorithms that
look at layers: with masks the vector has `layout.sizes` weights of a tensor, not `prod(shape)`, and
`layout.gather` cuts what was made for the whole model. A family imports `shared/` and the root of
`fed`, never another family. A field that only `prepare` sets, such as the sizes of layers, is
declared with `filled()`: it goes to the clients but is no option.

Files in the folders here are found by themselves; `symprune fed list` shows what they register.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import walk_packages

from symprune.fed.protocol import Algorithm
from symprune.fed.registry import ALGORITHMS, build, choose, options_of, register

for _module in sorted(module.name for module in walk_packages(__path__, f"{__name__}.")):
    import_module(_module)

__all__ = ["ALGORITHMS", "Algorithm", "build", "choose", "options_of", "register"]
