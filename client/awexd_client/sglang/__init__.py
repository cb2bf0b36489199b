"""SGLang: its scheduler processes as readers, and what drives them.

The engine is started with ``--custom-weight-loader awexd_client.sglang.load`` (``sgl.Engine``: a list of it); its
control process makes a ``WeightReader(job, engine, workers)`` of :class:`SGLangServer` or :class:`SGLangWorkers`.
"""

from __future__ import annotations

from awexd_client.sglang.drivers import SGLangServer, SGLangWorkers
from awexd_client.sglang.loader import load, register

__all__ = ["SGLangServer", "SGLangWorkers", "load", "register"]
