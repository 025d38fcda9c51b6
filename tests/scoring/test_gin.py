"""Counterfactuals are chosen in gin, alone or several."""

from cipo_jax.config import parse
from cipo_jax.scoring.counterfactuals import Masked, Several, Window
from cipo_jax.scoring.passages import OnlyPassages
from cipo_jax.training.step import Method


def test_any_subset_is_a_gin_line(clean_gin):
    parse(
        [],
        [
            "Method.counterfactual = @Several()",
            "Several.counterfactuals = [@Masked(), @literal/Masked(), @Removed(), @Window(), @supportive_only()]",
            "literal/Masked.mask_rows = 'action'",
            "literal/Masked.name = 'literal'",
            "Window.actions = 3",
        ],
    )
    chosen = Method().counterfactual
    assert isinstance(chosen, Several)
    assert [c.name for c in chosen.counterfactuals] == ["masked", "literal", "removed", "window", "supportive_only"]
    assert chosen.counterfactuals[:2] == (Masked(), Masked("action", name="literal"))
    assert chosen.counterfactuals[3:] == (Window(3), OnlyPassages("supportive"))
