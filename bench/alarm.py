"""When does the acceptance alarm speak? The trained pair on easy and hard text, and the pair broken in known ways.

Each server runs on the CPU platform and verifies whole blocks. A case decodes until the alarm has judged `STAYS`
windows of its text. The file says what was accepted and what the alarm said.

    python -m bench.alarm --out bench/results/alarm.json
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from bench.report import claim, finish
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import ON_CPU, OURS, environment, model_flags, new_server, wait_for
from dflash_sglang.demo.server import Server
from dflash_sglang.observe.alarm import FELL, NONE, POSITIONS, STAYS, WINDOW, Window
from dflash_sglang.pair import held_out_prompts, pair_directories
from dflash_sglang.settings.plugin_config import CONFIG_ENV

Tensors = dict[str, torch.Tensor]
PAIR = {name: Path(path) for name, path in pair_directories().items()}
DAMAGED = "features of the first layer"  # the draft still reads the context in the others
PROMPTS, NEW_TOKENS = 64, 96
RUSSIAN = (
    "Утром старая женщина пошла на рынок, купила хлеб, молоко и немного фруктов и долго говорила с пекарем о "
    "погоде. Позже она сидела у окна, смотрела на детей, которые играли во дворе, и думала о прошлых годах. "
)
GERMAN = (
    "Am Morgen ging die alte Frau zum Markt, kaufte Brot, Milch und ein wenig Obst, und sprach lange mit dem "
    "Bäcker über das Wetter. Später saß sie am Fenster, schaute den Kindern zu, die im Hof spielten, und dachte "
    "an die Jahre, in denen sie selbst noch über die Wiesen gelaufen war. Niemand wußte, woher der Fremde kam. "
)


class Text(NamedTuple):
    """What clients send."""

    prompts: list[list[int]]
    temperature: float


def own_text(temperature: float = 0.0) -> Text:
    """What the pair was trained for, from files that it never saw."""
    prompts = [prompt for prompt in held_out_prompts() if len(prompt) > 150][:PROMPTS]
    return Text([list(prompt.encode()) for prompt in prompts], temperature)


def texts() -> dict[str, Text]:
    """Own text and hard text, by name."""
    draw = random.Random(1)

    def parts_of(text: str) -> list[list[int]]:
        whole = list((3 * text).encode())
        return [whole[at : at + 160] for at in (draw.randrange(len(whole) - 160) for _ in range(PROMPTS))]

    noise = [[draw.randrange(256) for _ in range(160)] for _ in range(PROMPTS)]
    files = list("\n".join(held_out_prompts()).encode())
    return {
        "own text": own_text(),
        "own text, temperature 1": own_text(1.0),
        "own text, temperature 1.5": own_text(1.5),
        "random bytes": Text(noise, 0.0),
        "random bytes, temperature 1": Text(noise, 1.0),
        "Russian": Text(parts_of(RUSSIAN), 0.0),
        "German, temperature 1": Text(parts_of(GERMAN), 1.0),
        "contexts of 3000 tokens": Text([files[at : at + 3000] for at in range(0, 16000, 1000)], 0.0),
    }


# ---- Broken pairs ------------------------------------------------------------------------------------------


def changed_copy(
    checkpoint: Path,
    directory: Path,
    tensors: Callable[[Tensors], Tensors] | None = None,
    dflash_config: Mapping[str, Any] | None = None,
) -> Path:
    """A copy of a checkpoint with other tensors, or other fields of its `dflash_config`."""
    shutil.copytree(checkpoint, directory)
    if tensors is not None:
        file = directory / "model.safetensors"
        changed = tensors(load_file(file))
        save_file({name: tensor.contiguous() for name, tensor in changed.items()}, file, {"format": "pt"})
    if dflash_config is not None:
        file = directory / "config.json"
        config = json.loads(file.read_text())
        config["dflash_config"] |= dflash_config
        file.write_text(json.dumps(config))
    return directory


def another_target(tensors: Tensors) -> Tensors:
    """A target that says the same of any text, with other hidden states: its residual stream is rotated.

    So the text is as hard as before, and the draft is of another target."""
    out = {name: tensor.double() for name, tensor in tensors.items()}
    size = len(out["model.norm.weight"])
    rotation, _ = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(3)).double())

    def reads(norm: str, *names: str) -> None:
        for name in names:
            out[name] = out[name] * out[norm] @ rotation
        out[norm] = torch.ones_like(out[norm])

    out["model.embed_tokens.weight"] = out["model.embed_tokens.weight"] @ rotation
    end = ".input_layernorm.weight"
    for layer in sorted({name.removesuffix(end) for name in out if name.endswith(end)}):
        q, k, v, o = (f"{layer}.self_attn.{one}_proj.weight" for one in "qkvo")
        gate, up, down = (f"{layer}.mlp.{one}_proj.weight" for one in ("gate", "up", "down"))
        reads(f"{layer}.input_layernorm.weight", q, k, v)
        reads(f"{layer}.post_attention_layernorm.weight", gate, up)
        out[o], out[down] = rotation.T @ out[o], rotation.T @ out[down]
    reads("model.norm.weight", "lm_head.weight")
    return {name: tensor.float() for name, tensor in out.items()}


def scaled_features(*factors: float) -> Callable[[Tensors], Tensors]:
    """The draft reads the features of each target layer multiplied by a factor."""

    def change(tensors: Tensors) -> Tensors:
        joined = tensors["fc.weight"]
        by_layer = joined.view(len(joined), len(factors), -1) * torch.tensor(factors)[None, :, None]
        return {**tensors, "fc.weight": by_layer.view_as(joined).to(joined.dtype)}

    return change


def broken_pairs(directory: Path) -> Iterator[tuple[str, Path, Path]]:
    """Name, target and draft of each."""
    target, draft = PAIR["target"], PAIR["draft"]
    yield (
        "layer ids swapped",
        target,
        changed_copy(draft, directory / "ids", None, {"target_layer_ids": [4, 2, 0]}),
    )
    yield "wrong mask token", target, changed_copy(draft, directory / "mask", None, {"mask_token_id": 10})
    scaled = changed_copy(draft, directory / "last", scaled_features(1, 1, 64))
    yield "features of the last layer times 64", target, scaled
    for factor in (8, 64):
        scaled = changed_copy(draft, directory / f"first{factor}", scaled_features(factor, 1, 1))
        yield f"{DAMAGED} times {factor}", target, scaled
    yield "draft of another target", changed_copy(target, directory / "other", another_target), draft


# ---- A run -------------------------------------------------------------------------------------------------


@contextmanager
def served(target: Path, draft: Path, directory: Path) -> Iterator[Server]:
    flags = [
        *model_flags(OURS, str(target), str(draft)), *ON_CPU, "--skip-tokenizer-init", "--random-seed", "1",
        "--max-running-requests", "16", "--max-total-tokens", "60000", "--mem-fraction-static", "0.5",
        "--decode-log-interval", "10",
    ]  # fmt: skip
    own = {
        **environment(OURS, cpu=True),
        CONFIG_ENV: '{"copy": "off", "width": "block"}',
    }  # counts are the draft's
    with new_server(flags, environment=own, log=directory / "server.log") as server:
        wait_for(OURS, server)
        yield server


def acceptance(server: Server) -> dict[str, Any]:
    (state,) = server.get("/server_info")["internal_states"]
    return state["dflash_acceptance"]


def case(server: Server, pair: str, name: str, text: Text) -> dict[str, Any]:
    """Decodes a text for `STAYS` windows, and one more since one was open before."""
    before, lines = acceptance(server), server.log_text().count("acceptance alarm")
    while True:
        sampling = {"temperature": text.temperature, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        server.generate(input_ids=text.prompts, sampling_params=sampling)
        now = acceptance(server)
        steps = now["request_steps"] - before["request_steps"]
        if steps >= (STAYS + 1) * WINDOW:
            break
    accepted = [after - then for after, then in zip(now["accepted"], before["accepted"], strict=True)]
    seen = {
        "pair": pair,
        "text": name,
        "request_steps": steps,
        "accept_length": round(1 + sum(accepted) / steps, 3),
        "by_position": [round(of / steps, 4) for of in accepted],
        "alarm": now["alarm"],
        "lines": server.log_text().count("acceptance alarm") - lines,
    }
    print(json.dumps(seen), flush=True)
    return seen


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cases = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        with served(PAIR["target"], PAIR["draft"], directory) as server:
            cases += [case(server, "trained", name, text) for name, text in texts().items()]
            server.post("/flush_cache?timeout=60")
            updated = changed_copy(PAIR["target"], directory / "updated", another_target)
            server.post("/update_weights_from_disk", model_path=str(updated))
            cases.append(case(server, "target updated, draft stale", "own text", own_text()))
        for pair, target, draft in broken_pairs(directory):
            with served(target, draft, directory) as server:
                cases.append(case(server, pair, "own text", own_text()))
    print("\n".join(table(cases)))
    return finish("bench.alarm", arguments.out, claims(cases), cases=cases)


def table(cases: list[dict[str, Any]]) -> list[str]:
    """The rows of docs/results/alarm.md."""
    out = []
    for one in cases:
        window = Window(one["by_position"][:POSITIONS])
        cells = [
            f"{one['accept_length']:.2f}",
            *(f"{share:.3f}" for share in window),
            f"{window.accept_length:.2f}",
        ]
        out.append(f"| {one['pair']} | {one['text']} | {' | '.join(cells)} | {one['alarm']} |")
    return out


def claims(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The alarm is silent on the trained pair, and speaks once on each broken one that is no longer of use."""
    out = []
    for one in cases:
        if one["pair"].startswith(DAMAGED):
            continue
        fell = one["pair"].endswith("stale")
        expected = NONE if one["pair"] == "trained" else FELL if fell else "chance_level"
        said = f"{one['alarm']}, {one['lines']} lines"
        bound = f"= {expected}, {int(expected != NONE)} lines"
        out.append(claim(f"alarm of: {one['pair']}, {one['text']}", said, bound, f"= {said}" == bound))
    return out


if __name__ == "__main__":
    raise SystemExit(main())
