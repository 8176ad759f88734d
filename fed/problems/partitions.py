"""Who gets which rows: iid, by class, Dirichlet, by user, label ramp, by feature, with overlap.

Every partition is a function of the labels (or features, or users), the number of clients and a
seed, and returns one index tensor per client. All but overlapping blocks are disjoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.problems.datasets import Dataset


def iid(data: Dataset, clients: int, seed: int) -> list[Tensor]:
    """Shuffled and cut into parts whose sizes differ by one at most; one client has all rows in
    their order, as it would if it had brought them."""
    if clients == 1:
        return [torch.arange(len(data))]
    return [torch.from_numpy(p) for p in np.array_split(_random_order(len(data), seed), clients)]


def blocks(data: Dataset, clients: int, seed: int, overlap: int) -> list[Tensor]:
    """Shuffled, cut into equal blocks with the remainder in the last; client i gets `overlap`
    consecutive ones, cyclically (EF-BV's xi)."""
    if overlap > clients:
        raise SympruneError(f"{clients} clients have {clients} blocks, not {overlap}.")
    order = _random_order(len(data), seed)
    size = len(data) // clients
    cut = [order[i * size : (i + 1) * size] for i in range(clients - 1)]
    cut.append(order[(clients - 1) * size :])
    return [
        torch.from_numpy(np.concatenate([cut[(i + j) % clients] for j in range(overlap)]))
        for i in range(clients)
    ]


def by_class(data: Dataset, clients: int, seed: int, shards: int) -> list[Tensor]:
    """Sorted by label, cut into `clients * shards` equal shards, `shards` to each at random."""
    classes = len(np.unique(data.y.numpy()))
    if shards > classes:
        raise SympruneError(f"{data.name} has {classes} classes, not {shards}.")
    order = np.argsort(data.y.numpy(), kind="stable")
    size = len(data) // (clients * shards)
    if size == 0:
        raise SympruneError(f"{len(data)} rows do not fill {clients * shards} shards.")
    deal = _random_order(clients * shards, seed)
    cut = [order[i * size : (i + 1) * size] for i in range(clients * shards)]
    return [
        torch.from_numpy(np.concatenate([cut[j] for j in deal[i * shards : (i + 1) * shards]]))
        for i in range(clients)
    ]


def dirichlet(data: Dataset, clients: int, seed: int, alpha: float) -> list[Tensor]:
    """Each class is shared out by Dirichlet(alpha) proportions; nobody ends up without rows."""
    generator = np.random.default_rng(seed)
    owner = np.empty(len(data), np.int64)
    for label in np.unique(data.y.numpy()):
        rows = generator.permutation(np.flatnonzero(data.y.numpy() == label))
        share = generator.dirichlet(np.full(clients, alpha))
        cut = np.round(np.cumsum(share)[:-1] * len(rows)).astype(int)
        for client, part in enumerate(np.split(rows, cut)):
            owner[part] = client
    return _by_owner(_nobody_empty(owner, clients), clients)


def quantity(data: Dataset, clients: int, seed: int, alpha: float) -> list[Tensor]:
    """iid rows, but sizes drawn from Dirichlet(alpha)."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(data))
    cut = np.cumsum(generator.dirichlet(np.full(clients, alpha)))[:-1] * len(data)
    owner = np.empty(len(data), np.int64)
    for client, part in enumerate(np.split(order, np.round(cut).astype(int))):
        owner[part] = client
    return _by_owner(_nobody_empty(owner, clients), clients)


def by_user(data: Dataset, clients: int, seed: int) -> list[Tensor]:
    """The data's own owners; fewer clients than owners: a random choice of them."""
    if data.users is None:
        raise SympruneError(f"{data.name} does not say which user its rows belong to.")
    users = np.unique(data.users.numpy())
    if clients > len(users):
        raise SympruneError(f"{data.name} has {len(users)} users, not {clients}.")
    chosen = users[np.sort(_random_order(len(users), seed)[:clients])]
    return [torch.from_numpy(np.flatnonzero(data.users.numpy() == user)) for user in chosen]


def class_sets(data: Dataset, clients: int, seed: int, classes: int) -> list[Tensor]:
    """Exactly `classes` classes a client, dealt from shuffled decks; each class is cut evenly among
    those who hold it (FedP3's class-wise split)."""
    labels = np.unique(data.y.numpy())
    if classes > len(labels):
        raise SympruneError(f"{data.name} has {len(labels)} classes, not {classes}.")
    generator = np.random.default_rng(seed)
    deck: list[int] = []
    holders: list[list[int]] = [[] for _ in labels]
    for client in range(clients):
        hand: set[int] = set()
        while len(hand) < classes:
            if all(card in hand for card in deck):
                deck = deck + generator.permutation(len(labels)).tolist()
            hand.add(deck.pop(next(i for i, card in enumerate(deck) if card not in hand)))
        for card in hand:
            holders[card].append(client)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label, who in zip(labels, holders, strict=True):
        rows = generator.permutation(np.flatnonzero(data.y.numpy() == label))
        for client, part in zip(who, np.array_split(rows, max(len(who), 1)), strict=False):
            parts[client].append(part)
    return [torch.from_numpy(np.sort(np.concatenate(part))) for part in parts]


def preferences(data: Dataset, clients: int, seed: int, alpha: float) -> list[Tensor]:
    """Each client likes classes by its own Dirichlet(alpha) vector; clients take one row in turn
    until none is left, so sizes are equal (FedP3's Dirichlet split)."""
    generator = np.random.default_rng(seed)
    labels, y = np.unique(data.y.numpy(), return_inverse=True)
    stock = [generator.permutation(np.flatnonzero(y == c)).tolist() for c in range(len(labels))]
    likes = generator.dirichlet(np.full(len(labels), alpha), clients) + 1e-12
    left = np.array([len(rows) for rows in stock])
    owner = np.empty(len(data), np.int64)
    for turn, u in enumerate(generator.random(len(data))):
        client = turn % clients
        ladder = np.cumsum(likes[client] * (left > 0))
        chosen = int(np.searchsorted(ladder, u * ladder[-1], side="right"))
        owner[stock[chosen].pop()] = client
        left[chosen] -= 1
    return _by_owner(owner, clients)


def label_ramp(data: Dataset, clients: int, seed: int) -> list[Tensor]:
    """Binary labels: client i of n takes a share (i+1)/n of positive rows (Scafflix, appendix B).
    Sizes are equal and as large as both classes allow."""
    positive = _shuffle(np.flatnonzero(data.y.numpy() > 0), seed)
    negative = _shuffle(np.flatnonzero(data.y.numpy() <= 0), seed + 1)
    shares = [(i + 1) / clients for i in range(clients)]
    size = len(data) // clients
    while size and not (
        sum(round(s * size) for s in shares) <= len(positive)
        and sum(size - round(s * size) for s in shares) <= len(negative)
    ):
        size -= 1
    if size == 0:
        raise SympruneError(f"{data.name} has too few rows for {clients} clients by label.")
    parts, at, bt = [], 0, 0
    for share in shares:
        a = round(share * size)
        parts.append(np.concatenate([positive[at : at + a], negative[bt : bt + size - a]]))
        at, bt = at + a, bt + size - a
    return [torch.from_numpy(part) for part in parts]


def by_feature(data: Dataset, clients: int, seed: int) -> list[Tensor]:
    """Sorted along the first principal direction of the rows and cut into equal blocks."""
    x = data.x.reshape(len(data), -1).double()
    x = x - x.mean(0)
    direction = torch.linalg.eigh(x.T @ x).eigenvectors[:, -1]
    direction = direction * direction[direction.abs().argmax()].sign()
    order = (x @ direction).argsort(stable=True).numpy()
    return [torch.from_numpy(np.sort(part)) for part in np.array_split(order, clients)]


def by_cluster(data: Dataset, clients: int, seed: int) -> list[Tensor]:
    """k-means with as many clusters as clients, one cluster each (Scafflix's feature-wise)."""
    from sklearn.cluster import KMeans

    fitted = KMeans(clients, random_state=seed, n_init=1).fit(data.x.reshape(len(data), -1).numpy())
    return _by_owner(_nobody_empty(fitted.labels_.astype(np.int64), clients), clients)


def by_strata(data: Dataset, clients: int, seed: int, strata: int) -> list[Tensor]:
    """k-means with `strata` clusters, each dealt out to clients / strata clients; neighbouring
    clients share a cluster (Cohort Squeeze's feature-wise split, with 10 clusters of 10)."""
    if strata > clients:
        raise SympruneError(f"{clients} clients cannot fill {strata} strata.")
    members = np.array_split(np.arange(clients), strata)
    owner = np.empty(len(data), np.int64)
    for own, rows in zip(members, by_cluster(data, strata, seed), strict=True):
        order = _shuffle(rows.numpy(), seed)
        owner[order] = own[np.arange(len(order)) % len(own)]
    return _by_owner(_nobody_empty(owner, clients), clients)


PARTITIONS: dict[str, Callable[..., list[Tensor]]] = {
    "iid": iid,
    "blocks": blocks,
    "class": by_class,
    "class-set": class_sets,
    "dirichlet": dirichlet,
    "preference": preferences,
    "quantity": quantity,
    "user": by_user,
    "label-ramp": label_ramp,
    "feature": by_feature,
    "cluster": by_cluster,
    "strata": by_strata,
}
DEFAULTS = {
    "blocks": 2,
    "class": 2,
    "class-set": 2,
    "dirichlet": 0.5,
    "preference": 0.5,
    "quantity": 0.5,
    "strata": 2,
}


def check_partition(spec: str) -> None:
    """Fail where a spec names no partition."""
    name = spec.partition(":")[0]
    if name not in PARTITIONS:
        raise SympruneError(f"Unknown partition {name!r}; choose from {', '.join(PARTITIONS)}.")


def partition(data: Dataset, spec: str, clients: int, seed: int = 0) -> list[Tensor]:
    """The partition a spec names: `"iid"`, `"class:2"`, `"dirichlet:0.3"`, `"blocks:2"`, ..."""
    check_partition(spec)
    name, _, argument = spec.partition(":")
    if clients < 1:
        raise SympruneError(f"Cannot split data over {clients} clients.")
    if clients > len(data):
        raise SympruneError(f"{clients} clients are more than the {len(data)} rows of {data.name}.")
    if name not in DEFAULTS:
        if argument:
            raise SympruneError(f"Partition {name} takes no argument, {spec!r} has one.")
        return PARTITIONS[name](data, clients, seed)
    default = DEFAULTS[name]
    try:
        value = type(default)(argument) if argument else default
    except ValueError:
        raise SympruneError(f"Partition {spec!r} has an argument that is no number.") from None
    if not 0 < value < math.inf:
        raise SympruneError(f"Partition {spec!r} needs a positive argument.")
    return PARTITIONS[name](data, clients, seed, value)


def _by_owner(owner: np.ndarray, clients: int) -> list[Tensor]:
    return [torch.from_numpy(np.flatnonzero(owner == client)) for client in range(clients)]


def _nobody_empty(owner: np.ndarray, clients: int) -> np.ndarray:
    """Move one row from the largest client to each empty one."""
    counts = np.bincount(owner, minlength=clients)
    for client in np.flatnonzero(counts == 0):
        largest = int(counts.argmax())
        owner[np.flatnonzero(owner == largest)[-1]] = client
        counts[largest] -= 1
        counts[client] = 1
    return owner


def _random_order(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(size)


def _shuffle(rows: np.ndarray, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(rows)
