"""checkpoint-engine: whether its ParameterServer can be made on this machine, and how it fails where it cannot."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

from awexd.bench.link import Answer, serve

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")


def attempt() -> Answer:
    import torch
    from checkpoint_engine.ps import ParameterServer

    try:
        server = ParameterServer()
        server.register_checkpoint("bench", named_tensors={"a": torch.ones(1000)})
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the finding
        where = "ParameterServer()"
        return {"version": version("checkpoint-engine"), "failure": f"{where}: {type(error).__name__}: {error}"}
    return {"version": version("checkpoint-engine"), "failure": None}


if __name__ == "__main__":
    serve(int(sys.argv[1]), {"attempt": attempt})
