"""Calculon (calculon-ai, Apache-2.0), run on the same rows in the same process, from its own checkout.

``make peers`` fetches it into ``.peers/calculon``; ``CORDILLERA_CALCULON`` names another folder.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from _peers import PeerUnavailable

from cordillera.planning.calibration import MeasuredStep

CALCULON_COMMIT = "caa4b11"


class Calculon:
    """Calculon's step time for Megatron-LM's plain 1F1B with full recomputation on A100.

    It uses Calculon's own file of the A100 80GB, with the network rate of the cluster.

    Args:
        network_gigabytes_per_s: Rate of a device's share of the host's network cards, GB/s.
    """

    def __init__(self, network_gigabytes_per_s: float) -> None:
        folder = Path(
            os.environ.get("CORDILLERA_CALCULON") or Path(__file__).resolve().parent.parent / ".peers" / "calculon"
        )
        if not (folder / "systems" / "a100_80g.json").is_file():
            raise PeerUnavailable(f"{folder} holds no Calculon; run `make peers`, or set CORDILLERA_CALCULON")
        sys.path.insert(0, str(folder))
        try:
            from calculon.llm.llm import Llm
            from calculon.system import System
        except ImportError as error:
            raise PeerUnavailable(f"Calculon cannot be imported ({error}); run `make peers`") from error
        finally:
            sys.path.remove(str(folder))
        self._llm = Llm
        content = json.loads((folder / "systems" / "a100_80g.json").read_text())
        content["networks"][1]["bandwidth"] = network_gigabytes_per_s
        content["mem1"]["GiB"] = 1 << 20  # measured plans fit, so Calculon's own memory check is switched off
        self._system_content, self._system = content, System
        self._log = logging.getLogger("calculon")

    def seconds(self, measurement: MeasuredStep) -> float:
        """Return the predicted step time of a measured step's workload and layout."""
        model, layout = measurement.workload.model, measurement.layout
        application = self._llm.Application(
            {
                "name": "measured",
                "hidden": model.hidden,
                "feedforward": model.ffn or 4 * model.hidden,
                "seq_size": measurement.workload.sequence,
                "attn_heads": model.heads,
                "attn_size": model.head,
                "num_blocks": model.layers,
            }
        )
        inside = layout.tensor <= self._system_content["networks"][0]["size"]
        execution: dict[str, Any] = {
            "num_procs": layout.devices,
            "tensor_par": layout.tensor,
            "pipeline_par": layout.pipeline,
            "data_par": layout.data,
            "tensor_par_net": 0 if inside else 1,
            "pipeline_par_net": 1,
            "data_par_net": 1,
            "batch_size": measurement.workload.batch,
            "microbatch_size": layout.microbatch,
            "datatype": "float16",
            "fused_activation": False,
            "attention_type": "multihead",
            "activation_recompute": layout.recompute,
            "pipeline_interleaving": layout.chunks,
            "optimizer_sharding": False,
            "tensor_par_comm_type": "ar",
            "tensor_par_overlap": "none",
            "seq_par_ag_redo": False,
            "data_par_overlap": False,
            "weight_offload": False,
            "activations_offload": False,
            "optimizer_offload": False,
            "training": True,
        }
        system = self._system(copy.deepcopy(self._system_content))
        calculation = self._llm(application, self._log)
        calculation.compile(system, self._llm.Execution.from_json(execution))
        calculation.run(system)
        return float(calculation.get_total_time())
