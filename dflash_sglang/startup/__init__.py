"""Start-up validation: facts of a launch in, problems out. Pure; `decisions.py` gathers the facts."""

from dflash_sglang.startup.facts import (
    GPU_DRAFT_BACKENDS,
    ParallelFacts,
    Problem,
    ServingFacts,
    StartupError,
    TargetFacts,
)
from dflash_sglang.startup.fit_checks import config_problem, draft_problems, serving_problems
from dflash_sglang.startup.kv_checks import kv_problems, pool_problems, window_problems
from dflash_sglang.startup.launch_checks import COORDINATION, UNSERVED, launch_problems, reported_rows_problems
from dflash_sglang.startup.own_module_checks import own_problems, unread_problems
from dflash_sglang.startup.quantisation_checks import MODELOPT, quantisation_problems
from dflash_sglang.startup.token_map_checks import token_map_problems
from dflash_sglang.startup.weights_checks import weights_problems

__all__ = [
    "COORDINATION",
    "GPU_DRAFT_BACKENDS",
    "MODELOPT",
    "UNSERVED",
    "ParallelFacts",
    "Problem",
    "ServingFacts",
    "StartupError",
    "TargetFacts",
    "config_problem",
    "draft_problems",
    "kv_problems",
    "launch_problems",
    "own_problems",
    "pool_problems",
    "quantisation_problems",
    "reported_rows_problems",
    "serving_problems",
    "token_map_problems",
    "unread_problems",
    "weights_problems",
    "window_problems",
]
