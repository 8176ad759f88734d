"""Two hosts, as near as one machine comes to them: network namespaces that share one cable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from symprune import Recipe
from symprune.jobs import pruning

NAMES = (f"symprune-a-{os.getpid()}", f"symprune-b-{os.getpid()}")
CABLES = (f"sy-a{os.getpid() % 10**8}", f"sy-b{os.getpid() % 10**8}")
ADDRESSES = ("10.213.77.1", "10.213.77.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[None]:
    """Both namespaces, and the cable between them; nothing of it is left behind."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command")
    with ExitStack() as stack:
        try:
            for name in NAMES:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ip("link", "add", CABLES[0], "type", "veth", "peer", "name", CABLES[1])
            for name, cable, address in zip(NAMES, CABLES, ADDRESSES, strict=True):
                ip("link", "set", cable, "netns", name)
                ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
                ip("-n", name, "link", "set", cable, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        yield


@pytest.mark.slow
def test_two_hosts_make_the_files_of_one_process(
    hosts: None, tiny_folder: Path, tmp_path: Path
) -> None:
    asked = [
        "-m", "symprune", "prune", "--model", str(tiny_folder), "--method", "wanda", "--update",
        "lsq", "--calibration", __file__, "--nsamples", "5", "--seqlen", "32", "--no-eval",
        "--no-samples", "--device", "cpu", "-o", str(tmp_path / "two"),
    ]  # fmt: skip
    started = []
    for rank, (name, cable) in enumerate(zip(NAMES, CABLES, strict=True)):
        launcher = [
            "ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes",
            "2", "--node_rank", str(rank), "--nproc_per_node", "1", "--master_addr", ADDRESSES[0],
            "--master_port", "29517", *asked,
        ]  # fmt: skip
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": cable, "OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen(
                launcher, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    said = [process.communicate(timeout=900)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert "Saved to" in said[0] and "Saved to" not in said[1]
    recipe = Recipe("wanda", update="lsq", calibration=__file__, nsamples=5, seqlen=32)
    one = pruning.Job(str(tiny_folder), recipe, tmp_path / "one", device="cpu", evaluate=False)
    pruning.prune(one)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == names
    for name in names:
        one_file, two_file = (tmp_path / run / name for run in ("one", "two"))
        assert one_file.read_bytes() == two_file.read_bytes(), name
