"""What SGLang's test kits need here: servers of the trained pair, and requests that its tiny target can serve.

The target knows bytes and Python source, and nothing of France: `fitted` changes what a kit sends, never what it
expects to get back.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest import TestCase, mock

import pytest
from transformers import AutoTokenizer

from dflash_sglang.demo.server import Server
from tests.support.engines import RETRACTING, serve
from training.pair import pair_directories

ON_GPU = os.environ.get("DFLASH_TEST_DEVICE", "cpu") == "cuda"
TARGET, DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
BYTES, VOCABULARY = 256, 320  # of the target; special tokens lie between
MOST_NEW_TOKENS = 3000  # of a context of 4096
LONGEST_TEXT = 3000

# Arguments and environment that another device needs.
ON_DEVICE: dict[str, Any] = dict(device="cuda", dtype="bfloat16", mem_fraction_static=None, fresh=True)
DEVICE_ENVIRONMENT = {"SGLANG_PLATFORM": ""}
# The scheduler counts its slots after every step, as on the servers of SGLang's own session kits.
CHECKS = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
RUNNING_TIMEOUT = {"SGLANG_REQ_RUNNING_TIMEOUT": "1" if ON_GPU else "8"}
SERVERS: dict[str, dict[str, Any]] = {
    "ours": dict(draft=DRAFT, chunked_prefill_size=128, enable_streaming_session=True),
    "ours, harried": dict(
        draft=DRAFT,
        page_size=64,
        chunked_prefill_size=512,
        enable_streaming_session=True,
        environment={**RUNNING_TIMEOUT, **RETRACTING},
    ),
}


def without_the_last_layer(directory: Path) -> Path:
    """The trained draft, fed other layers of the target: the built-in worker cannot capture the last one."""
    shutil.copytree(DRAFT, directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    ids = config["dflash_config"]["target_layer_ids"]
    config["dflash_config"]["target_layer_ids"] = list(range(len(ids)))
    path.write_text(json.dumps(config))
    return directory


class Servers:
    """The servers by name; one is alive at a time."""

    def __init__(self, directory: Path):
        self._stack = ExitStack()
        self._name: str | None = None
        self._template = directory / "chat.jinja"  # the checkpoint has none
        self._template.write_text("{% for message in messages %}{{ message['content'] }}\n{% endfor %}")

    def get(self, name: str) -> Server:
        if self._name != name:
            self.close()
            self._server = self._stack.enter_context(self._serve(**SERVERS[name]))
            self._name = name
        return self._server

    def close(self) -> None:
        self._name = None
        self._stack.close()

    def _serve(
        self, draft: Path | None = None, environment: Mapping[str, str] | None = None, **arguments: Any
    ) -> AbstractContextManager[Server]:
        everywhere = {**CHECKS, "DFLASH_SGLANG_REQUIRE": "1", **(DEVICE_ENVIRONMENT if ON_GPU else {})}
        return serve(
            TARGET,
            draft,
            environment={**everywhere, **(environment or {})},
            skip_tokenizer_init=None,
            chat_template=self._template,
            constrained_json_disable_any_whitespace=True,  # the target would never end it
            random_seed=1,
            **(ON_DEVICE if ON_GPU else {}),
            **arguments,
        )


class OnServer(TestCase):
    """What a kit expects of its host."""

    serves = "ours"
    model = str(TARGET)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    api_key = "none"

    @pytest.fixture(autouse=True)
    def attached(self, servers: Servers) -> None:
        self.attach(servers.get(self.serves))

    @classmethod
    def attach(cls, server: Server) -> None:
        cls.server, cls.base_url, cls.process = server, server.url, server.process
        random.seed(0)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self.enterContext(mock.patch.object(owner, name, value))


def fitted(body: Any, key: str = "") -> Any:
    """A kit's JSON body with texts, token ids and lengths that the target can serve."""
    if isinstance(body, dict):
        return {name: fitted(value, name) for name, value in body.items()}
    if isinstance(body, list):
        return [fitted(item, key) for item in body]
    if isinstance(body, str):
        return body if len(body) <= LONGEST_TEXT else body[: LONGEST_TEXT // 2] + body[-LONGEST_TEXT // 2 :]
    if key in ("input_ids", "token_ids_logprob") and body is not None and body >= VOCABULARY:
        return body % BYTES
    if key == "max_new_tokens":
        return min(body, MOST_NEW_TOKENS)
    return body
