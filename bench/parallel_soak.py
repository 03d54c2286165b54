"""A parallel layout under uneven load: lossless before and after, every request answered, no slot held.

python -m bench.parallel_soak --layout NAME --seconds N --out FILE [--gpus 0,1] [--idle 60]

Serves the layout (`bench.layouts`) with this package's worker and without speculation, in bfloat16. Greedy outputs
of the two must agree but where plain decoding's two best tokens are almost tied: the two round differently. Then
the load of `bench.uneven` for N seconds, with a stretch of silence after its first round, and the same comparison
again. A request without an answer after TIMEOUT is a failure, and the logs' last lines go into the report.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.cluster import Cluster, stop_on_sigterm, stop_together
from bench.layouts import LAYOUTS, PORTS_PER_SERVER, Layout
from bench.servers import environment_of
from bench.uneven import PHASES, astray, compared, phases
from dflash_sglang.bench.random_pair import write_pair
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import OURS, PLAIN, model_flags
from dflash_sglang.demo.server import free_port
from tests.soak.checks import as_plain, compare, problems
from tests.soak.driver import Outcome, ask, call, drive, held_tokens
from tests.soak.requests import Corpus, Request, corpus_of
from tests.soak.run import Soak, claims
from training import pair

TIMEOUT = 120.0  # seconds, of any one request; the server's watchdog speaks before
SEED_OF_COMPARED, COMPARED_AT_A_TIME = 77, 16
# Of plain's logprobs of its two best tokens. One step of bfloat16 at logits of 16 to 32 is 0.125.
TIE = {"cuda": 0.13, "cpu": 1e-4}
FLAGS = [
    "--context-length", "1024", "--max-total-tokens", "8000",
    "--mem-fraction-static", "0.8", "--cuda-graph-max-bs-decode", "32", "--chunked-prefill-size", "512",
    "--watchdog-timeout", "100", "--log-level-http", "warning",
]  # fmt: skip


def servers_of(layout: Layout, arguments: argparse.Namespace, scratch: Path) -> dict[str, Cluster]:
    """Ours and plain decoding's, not started yet."""
    trained = layout.pair == "trained"
    directories = pair.pair_directories() if trained else write_pair(scratch, layout.pair)
    if not trained:  # over the same bytes, so that grammars have their texts
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(Path(pair.pair_directories()["target"], file), directories["target"])
    dtype = "bfloat16" if arguments.device == "cuda" else "float32"
    flags = [*FLAGS, "--device", arguments.device, "--dtype", dtype, *arguments.flags]
    # Plain decoding counts penalties up to the last token only without overlap.
    more = {OURS: [], PLAIN: ["--disable-overlap-schedule"]}
    port = arguments.port or free_port()
    return {
        kind: Cluster(
            layout,
            kind,
            [*model_flags(kind, directories["target"], directories["draft"]), *flags, *more[kind]],
            port + i * PORTS_PER_SERVER,
            environment_of(kind, arguments.device == "cpu", arguments.gpus),
            arguments.logs or scratch,
        )
        for i, kind in enumerate((OURS, PLAIN))
    }


@contextlib.contextmanager
def ready(cluster: Cluster) -> Iterator[str]:
    """The URL of a cluster that answers; one that is not started yet is started here, and ended."""
    with contextlib.ExitStack() as stack:
        if not cluster.started:
            stack.enter_context(cluster)
        cluster.wait_ready()
        yield cluster.head.url


class LayoutSoak:
    """One layout's soak, and what it has found so far."""

    def __init__(self, layout: Layout, arguments: argparse.Namespace) -> None:
        self.layout, self.arguments = layout, arguments
        self.figures: dict[str, Any] = {}
        self.claims: list[dict[str, Any]] = []
        self.problems: dict[str, Any] = {}
        self.defects: list[Any] = []

    def run(self, servers: dict[str, Cluster]) -> None:
        """Raises OSError, HTTPException, ValueError or ServerFailed where a server ends or stops to answer."""
        started = time.perf_counter()
        with ready(servers[PLAIN]) as url:
            corpus = corpus_of(json.loads(call(url, "GET", "/model_info")[1])["tokenizer_path"])
            asked = compared(self.arguments.compared, SEED_OF_COMPARED, corpus, self.layout.replicas)
            plain = drive(url, [as_plain(request) for request in asked], COMPARED_AT_A_TIME, TIMEOUT)
        threading.Thread(target=servers[PLAIN].stop).start()  # takes some seconds
        with ready(servers[OURS]) as url:
            self.figures["start_seconds"] = round(time.perf_counter() - started, 1)
            self.compare("before the load", url, asked, plain, corpus)
            soaked = self.soak(url, corpus)
            self.compare("after the load", url, asked, plain, corpus)
        self.judge(soaked)

    def compare(
        self, when: str, url: str, asked: Sequence[Request], plain: Sequence[Outcome], corpus: Corpus
    ) -> None:
        """Greedy outputs against plain decoding's."""
        ours = drive(url, asked, COMPARED_AT_A_TIME, TIMEOUT)
        wrong = [what for outcome in (*ours, *plain) for what in problems(outcome, corpus.eos_ids)]
        if wrong:
            self.problems[f"compared {when}"] = wrong[:20]
            self.claims.append(
                report.claim(f"compared {when}: requests answered properly", len(wrong), "0", False)
            )
            return
        found, tie = compare(ours, plain), TIE[self.arguments.device]
        defects = found.defects(tie)
        self.defects += [(when, one.what, one.gap, dict(one.request.sampling)) for one in defects]
        answers = [answer["meta_info"] for outcome in ours for answer in outcome.answers]
        steps = sum(meta.get("spec_verify_ct", 0) for meta in answers)  # none where the prefill was the end
        self.figures[f"compared {when}"] = {
            "outputs": found.compared,
            "equal": found.compared - len(found.divergences),
            "gaps_of_divergences": sorted(one.gap for one in found.divergences if one.gap is not None),
            "tokens_per_verify_step": round(sum(m["completion_tokens"] - 1 for m in answers) / max(1, steps), 3),
        }
        what = f"greedy outputs {when} that part from plain's where its two best tokens are {tie} or more apart"
        self.claims.append(report.claim(what, len(defects), "0", not defects))

    def soak(self, url: str, corpus: Corpus) -> Soak:
        """The load, by phases, and what the server holds before and after it."""
        before = held_tokens(url)
        outcomes: list[Outcome] = []
        seconds, idle, turn = 0.0, 0.0, 0
        log: list[dict[str, Any]] = []
        for phase in phases(self.layout.replicas):
            if turn == PHASES:
                time.sleep(self.arguments.idle)
                idle = self.arguments.idle
            if turn > PHASES and seconds >= self.arguments.seconds:
                break
            start = time.perf_counter()
            came = drive(url, phase.requests(1000 + turn, corpus), phase.concurrency, TIMEOUT)
            elapsed = time.perf_counter() - start
            log.append(
                {"phase": phase.name, "rank": phase.rank, "requests": len(came), "seconds": round(elapsed, 2)}
            )
            print(log[-1], flush=True)
            outcomes += came
            seconds, turn = seconds + elapsed, turn + 1
            if any(outcome.error.startswith("no answer") for outcome in came):
                break
        self.figures["phases"], self.figures["idle_seconds"] = log, idle
        return self.settled(url, corpus, outcomes, seconds, before)

    def settled(self, url: str, corpus: Corpus, outcomes: list[Outcome], seconds: float, before: int) -> Soak:
        after, alive = -1, False
        with contextlib.suppress(OSError, http.client.HTTPException):  # of a server that hangs or is gone
            after = held_tokens(url)
            flushed = call(url, "POST", "/flush_cache?timeout=60")[0] == 200 and held_tokens(url) == 0
            again = ask(url, Request(as_plain(outcomes[0].request).body), TIMEOUT)
            alive = flushed and not problems(again, corpus.eos_ids)
        return Soak(outcomes, corpus.eos_ids, seconds, before, after, alive)

    def judge(self, soaked: Soak) -> None:
        self.problems |= soaked.problems()
        self.figures["load"] = soaked.figures()
        self.claims += claims(soaked)
        silent = sum(outcome.error.startswith("no answer") for outcome in soaked.outcomes)
        what = f"requests without an answer after {TIMEOUT:.0f} s"
        self.claims.append(report.claim(what, silent, "0", silent == 0))
        ranks = Counter(
            answer["meta_info"].get("dp_rank") for outcome in soaked.finished for answer in outcome.answers
        )
        if self.layout.replicas > 1:
            self.figures["answers_by_rank"] = {str(rank): ranks[rank] for rank in sorted(ranks, key=str)}
            missing = sorted(set(range(self.layout.replicas)) - set(ranks))
            self.claims.append(
                report.claim("data-parallel ranks that answered nothing", missing, "none", not missing)
            )
            lost = sum(len(astray(o.request.body, o.answers)) for o in soaked.finished)
            what = "answers of another rank than the one asked for"
            self.claims.append(report.claim(what, lost, "0", lost == 0))


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--layout", required=True, choices=list(LAYOUTS))
    parser.add_argument(
        "--seconds", type=float, required=True, help="of load; at least a round of phases and one more"
    )
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--idle", type=float, default=10.0, help="seconds of silence after the first round")
    parser.add_argument("--compared", type=int, default=96, help="greedy requests before and after the load")
    parser.add_argument("--gpus", help="of the servers, as in CUDA_VISIBLE_DEVICES; all by default")
    parser.add_argument("--port", type=int, help="of the first server; 400 ports from it on stay in use")
    parser.add_argument("--device", choices=list(TIE), default="cuda")
    parser.add_argument("--flags", type=shlex.split, default=[], help="more flags of both servers, one string")
    parser.add_argument("--logs", type=Path, help="directory that keeps the servers' logs")
    arguments = parser.parse_args()
    layout = LAYOUTS[arguments.layout]
    soak = LayoutSoak(layout, arguments)
    with contextlib.ExitStack() as stack:
        servers = servers_of(layout, arguments, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.callback(stop_together, servers.values())
        stop_on_sigterm(servers.values())
        if arguments.device == "cuda":  # a machine with GPUs starts both at once
            for cluster in servers.values():
                cluster.start()
        more: dict[str, Any] = {}
        try:
            soak.run(servers)
        except (OSError, http.client.HTTPException, RuntimeError, ValueError) as error:
            what = "the servers start, answer and stay up"
            soak.claims.append(report.claim(what, f"{type(error).__name__}: {error}"[:3000], "true", False))
        if not all(claim["ok"] for claim in soak.claims):
            more["logs"] = [line for cluster in servers.values() for line in cluster.log_tail()]
        return report.finish(
            "bench.parallel_soak",
            arguments.out,
            soak.claims,
            layout={"name": layout.name, "title": layout.title, "gpus": layout.gpus},
            figures=soak.figures,
            problems=soak.problems,
            defects=soak.defects,
            **more,
        )


if __name__ == "__main__":
    sys.exit(main())
