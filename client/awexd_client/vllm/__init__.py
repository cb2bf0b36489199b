"""vLLM: the plug-in that adds weight transfer back end ``awexd``, and drivers of one running instance.

``register`` is vLLM's to call (entry point group ``vllm.general_plugins``); the engine is started with
``--weight-transfer-config '{"backend": "awexd"}'``. Whoever drives the updates does it by vLLM's own calls or by
:class:`awexd_client.WeightReader` over one of these drivers::

    workers = VLLMServer("http://127.0.0.1:8000").connect("grpo", "rollout-0")
    WeightReader("grpo", "rollout-0", workers).update()
"""

from __future__ import annotations

import logging

from awexd_client.vllm.drivers import VLLMServer, VLLMWorkers

__all__ = ["BACKEND", "VLLMServer", "VLLMWorkers", "register"]

BACKEND = "awexd"
_log = logging.getLogger(__name__)


def register() -> None:
    """Makes the back end known to vLLM in this process; may be called again. Imports the engine itself only on use."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        _log.warning("this vLLM has no weight transfer API: back end %r is not there", BACKEND)
        return
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "awexd_client.vllm.engine", "AwexdWeightTransferEngine")
