"""The word-level tokenizer: exact round trips, fixed vocabulary, loadable folder."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cipo_jax.data.names import ALL_NAMES
from cipo_jax.data.splits import SyntheticTask
from cipo_jax.data.tokenizer import EOS, PAD, build_tokenizer, load_tokenizer, pieces, save_tokenizer, vocabulary
from cipo_jax.errors import UserError
from cipo_jax.protocols.search_r1 import TAGS, SearchR1

TOKENIZER = build_tokenizer()


def _encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def test_vocabulary_is_fixed_and_padded():
    tokens = vocabulary()
    assert len(tokens) == len(set(tokens)) == len(TOKENIZER) == 960
    assert tokens[:3] == [PAD, EOS, "<unk>"]
    assert [TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.unk_token_id] == [0, 1, 2]
    assert TOKENIZER.convert_ids_to_tokens(list(range(len(tokens)))) == tokens


def test_names_are_distinct_and_single_tokens():
    assert len({name.lower() for name in ALL_NAMES}) == len(ALL_NAMES) == 298
    for token in (*ALL_NAMES, *TAGS):
        assert len(_encode(token)) == len(_encode(" " + token)) == 1


@pytest.mark.parametrize("seed", [0, 1])
def test_world_text_has_no_unknown_and_survives(seed):
    task = SyntheticTask(seed=seed, validation_questions=30, conflict_questions=30, stratum_questions=30)
    texts = [task.memory().text()]
    for questions in (task.validation(), *task.reported().values()):
        texts += [world.text() for world in questions.worlds.values()]
        texts += [f"{q.question} {' '.join(q.golds)}" for q in questions.questions]
    for text in texts:
        ids = _encode(text)
        assert TOKENIZER.unk_token_id not in ids
        assert TOKENIZER.decode(ids) == text


def test_default_prompt_has_no_unknown():
    protocol = SearchR1(TOKENIZER)
    ids = protocol.prompt_ids("Who founded the capital of Valdoria?")
    assert TOKENIZER.unk_token_id not in ids
    assert TOKENIZER.decode(ids) == protocol.prompt_text("Who founded the capital of Valdoria?")


@given(st.lists(st.sampled_from([token for token in vocabulary()[3:] if "unused" not in token]), max_size=12))
@settings(deadline=None, max_examples=200)
def test_text_of_known_words_survives(tokens):
    text = "".join(tokens)
    ids = _encode(text)
    if TOKENIZER.unk_token_id not in ids:  # words written together may make an unknown one
        assert TOKENIZER.decode(ids) == text


@given(st.text(max_size=40))
@settings(deadline=None, max_examples=200)
def test_pieces_concatenate_to_any_text(text):
    assert "".join(pieces(text)) == text


def test_folder_loads_as_the_same_tokenizer(tmp_path):
    save_tokenizer(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = "<think> The river of Brenavik is Ashewe. </think><answer> Ashewe </answer><eos>"
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    ids = loaded(text, add_special_tokens=False)["input_ids"]
    assert ids == _encode(text) and loaded.decode(ids) == text
    assert ids[-1] == loaded.eos_token_id == 1 and loaded.pad_token_id == 0


def test_empty_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="no tokenizer there"):
        load_tokenizer(tmp_path)
