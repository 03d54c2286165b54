"""Step-3.5's reference is the model of transformers. `tests/engine/test_mtp.py` holds proposals to it."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.zoo import step3p5
from tests.zoo.step3p5 import LAYERS, Reference


def test_the_reference_is_the_model_of_transformers(tmp_path: Path) -> None:
    """With transformers' own masks and rotary embeddings; the text is four windows long."""
    from transformers import Step3p7TextConfig, Step3p7TextModel

    config = Step3p7TextConfig(**step3p5.hub_config())
    config._attn_implementation = "eager"
    model, own = Step3p7TextModel(config).eval(), Reference(step3p5.write(tmp_path), step3p5.WINDOW)
    ids = torch.randint(4, 250, (100,), generator=torch.Generator().manual_seed(7))
    for i, layer in enumerate(model.layers):
        layer.load_state_dict(own.layers[i].state_dict())
    model.norm.load_state_dict(own.norm.state_dict())
    model.embed_tokens.weight.data.copy_(own.embedding)
    assert len(model.layers) == LAYERS
    with torch.no_grad():
        expected = model(ids[None]).last_hidden_state[0] @ own.head.T
    torch.testing.assert_close(own.logits(ids), expected, rtol=1e-4, atol=1e-4)
