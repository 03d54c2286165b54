"""SGLang's own test kits (`sglang.test.kits`) as judges of our worker, serving the trained pair.

A class here is a kit, or some, on one of the servers of `kits.py`; tests carry the kits' names and check what the
kits check. `kits.fitted` translates their requests for the tiny target, and a docstring says where an adapter
changes more than a number.

On a GPU: `DFLASH_TEST_DEVICE=cuda pytest -m gpu tests/engine/test_kits.py` runs the same in bfloat16 with CUDA
graphs.

Run: abort_timeout (abort of all, running timeout), kl_divergence, pause_generation, spec_server_kits (feature;
sampling mask on a GPU), streaming_session, unified_radix_cache_kit.

Left out:

- basic_api_contract, basic_decode_correctness, basic_scheduler_stress, ebnf_constrained, json_constrained,
  json_mode, matched_stop, regex_constrained; of spec_server_kits correctness, parity, logprob, penalty, grammar:
  `test_request_fields` and `test_oracle` ask for the same fields, and compare tokens
- spec_decoding: `test_serving` asks for the accept length of the reference loop
- cache_hit: unified_radix_cache_kit and `radix_attention` of spec_server_kits count hits
- eval_accuracy, lm_eval, mmmu_vlm, GSM8K in spec_server_kits and in unified_radix_cache_kit, the
  throughput of SpecPerfKit: data sets to download, and a target that could solve them
- reasoning: a target that reasons; vlm_perf: images; perf_bench: no kit, helpers for figures of SGLang's machines
- anthropic_messages: another form of the same HTTP requests, which no worker sees
- fwd_occupancy: how busy a GPU is with a model of billions of parameters
- SpecHiddenStatesKit: `--enable-return-hidden-states` is refused at start-up
- SpecSamplingMaskKit on the CPU: SGLang refuses masks of sampled DFLASH requests without its CUDA sampler
- waiting timeout in abort_timeout: the request that times out never reaches a worker
- AccuracyTwoPassMixin in unified_radix_cache_kit: GSM8K, and a hierarchical cache
- prefix_cache_branching, dsa_metadata: recurrent state and sparse attention, which no DFLASH target here has
- pd_parity: disaggregated prefill, which is refused at start-up
- attention_unittest, unified_radix_cache (the directory): units of SGLang's own backends and tree, no worker
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import requests
from sglang.test import kl_test_utils
from sglang.test.kits import radix_cache_server_kit, streaming_session_kit
from sglang.test.kits import spec_server_kits as spec_kits
from sglang.test.kits import unified_radix_cache_kit as unified_kit
from sglang.test.kits.abort_timeout_kit import AbortAllMixin, RunningTimeoutTwoWaveMixin
from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.server_fixtures import spec_eagle_fixture, streaming_session_fixture
from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase

from tests.support.kits import MOST_NEW_TOKENS, ON_GPU, OnServer, Servers, fitted
from training.pair import held_out_prompts

pytestmark = [pytest.mark.slow, pytest.mark.gpu if ON_GPU else pytest.mark.release]

TEXT = OnServer.tokenizer.encode("\n".join(held_out_prompts()))
KL_DIVERGENCE = 0.003 if ON_GPU else 1e-6  # of logprobs while decoding from those of a prefill


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    running = Servers(tmp_path_factory.mktemp("kits"))
    yield running
    running.close()


@pytest.fixture(scope="module", autouse=True)
def requests_are_fitted() -> Iterator[None]:
    post = requests.post

    def fitted_post(url: str, data: Any = None, json: Any = None, **options: Any) -> requests.Response:
        return post(url, data=data, json=fitted(json), **options)

    with mock.patch.object(requests, "post", fitted_post):
        yield


@pytest.mark.skipif(not ON_GPU, reason="SGLang refuses these requests without its CUDA sampler")
class TestSpecSamplingMask(spec_kits.SpecSamplingMaskKit, OnServer):
    pass


class TestSpecFeature(spec_kits.SpecFeatureKit, OnServer):
    send_requests_abort = SpecEagleServerBase.send_requests_abort

    def test_radix_attention(self) -> None:
        """A tree of 40 nodes; the kit's has 400."""
        tree = radix_cache_server_kit.gen_radix_tree(num_nodes=40, chunk_len=64)
        self.replace(radix_cache_server_kit, "gen_radix_tree", lambda: tree)
        super().test_radix_attention()

    def test_request_abort(self) -> None:
        """Two prompts per client in place of four. The kit's threads keep their failures to themselves."""
        self.finished: list[int] = []
        self.replace(spec_eagle_fixture, "PROMPTS", spec_eagle_fixture.PROMPTS[:2])
        left = self.server.log_text().count("Request is disconnected")
        super().test_request_abort()
        self.assertEqual(len(self.finished), 4)
        if not ON_GPU:  # where a request outlasts its client, who leaves after a second
            self.assertGreater(self.server.log_text().count("Request is disconnected"), left)
        self.assertIsNone(self.process.poll())

    def send_request(self) -> None:
        SpecEagleServerBase.send_request(self)
        self.finished.append(1)


class TestKLDivergence(KLDivergenceMixin, OnServer):
    kl_div_thres = KL_DIVERGENCE
    kl_div_max_samples = 8
    kl_div_prefill_max_new_tokens = kl_div_decode_max_new_tokens = 48

    def setUp(self) -> None:
        """Held-out text in place of a data set to download."""
        prompts = [TEXT[1000 * i : 1000 * i + 100 + 50 * i] for i in range(self.kl_div_max_samples)]
        self.replace(kl_test_utils, "get_input_ids", lambda **_: prompts)


class TestUnifiedRadixTree(unified_kit.UnifiedRadixTreeTestMixin, OnServer):
    test_gsm8k = None
    kl_threshold = KL_DIVERGENCE
    num_groups, branches_per_group, prefix_len, max_new_tokens = 2, 2, 200, 32
    input_ids = [TEXT[1000 * i : 1000 * i + 300] for i in range(4)]

    def setUp(self) -> None:
        """Turns of a quarter of the kit's lengths."""
        suffixes = unified_kit._random_suffixes
        self.replace(unified_kit, "_random_suffixes", lambda n, length, seed: suffixes(n, length // 4, seed))


class TestAbortAll(AbortAllMixin, OnServer):
    abort_all_num_requests = 16
    abort_all_sleep = 0.4 if ON_GPU else 1.0


class TestPauseResume(PauseResumeInPlaceMixin, OnServer):
    pause_num_requests = 8
    pause_max_new_tokens = MOST_NEW_TOKENS if ON_GPU else 400
    pause_ignore_eos = True
    pause_duration = 1.0


class TestStreamingSession(streaming_session_kit.StreamingSessionKitMixin, OnServer):
    def setUp(self) -> None:
        """Sessions that fit into the context and the pool; shorter waits before the server's health is asked."""
        self.replace(streaming_session_fixture, "CONCURRENT_LOGPROB_ROUNDS", 2)
        self.replace(streaming_session_fixture, "STRESS_NUM_SESSIONS", 4)
        self.replace(streaming_session_fixture, "STRESS_NUM_TURNS", 4)
        self.replace(
            streaming_session_kit, "time", SimpleNamespace(sleep=lambda s, wait=time.sleep: wait(min(s, 1)))
        )


class TestAbortLeakRepro(streaming_session_kit.AbortLeakReproKitMixin, OnServer):
    serves = "ours, harried"

    def setUp(self) -> None:
        """Half of the kit's rounds, and prompts for refusal that are longer than this context."""
        self.replace(streaming_session_fixture, "ABORT_REPRO_ROUNDS", 4)
        self.replace(streaming_session_fixture, "ABORT_REPRO_ABORT_TOKENS", 4200)


class TestRunningTimeout(RunningTimeoutTwoWaveMixin, OnServer):
    serves = "ours, harried"
    running_timeout_max_new_tokens = MOST_NEW_TOKENS
    running_timeout_sleep = 1.0

    def test_running_timeout_no_crash(self) -> None:
        super().test_running_timeout_no_crash()
        if not ON_GPU:  # where all of them could end in time
            self.assertGreaterEqual(self.server.log_text().count("503 Service Unavailable"), 1)
