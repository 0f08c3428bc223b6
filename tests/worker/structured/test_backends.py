"""Both backends: which texts the kinds of constraints allow, going back, and texts that are forced."""

from __future__ import annotations

import json
import re

import llguidance
import numpy as np
import pytest
from grammars import EOS, VOCAB_SIZE, allowed_ids, demo_library, random_walk

from quire.worker.structured import guidance_backend
from quire.worker.structured.compilation import GUIDANCE, XGRAMMAR, GrammarLibrary
from quire.worker.structured.grammar import (
    GrammarSpec,
    Matcher,
    MatcherFailed,
    UnsupportedConstraint,
    num_words,
)

BACKENDS = (XGRAMMAR, GUIDANCE)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def library() -> GrammarLibrary:
    return demo_library()


def new_matcher(library: GrammarLibrary, backend: str, kind: str, text: str) -> Matcher:
    return library.load(library.compile(GrammarSpec(kind, text), backend)).new_matcher()


def mask(matcher: Matcher) -> list[int]:
    words = np.zeros(num_words(VOCAB_SIZE), dtype=np.int32)
    matcher.fill_mask(words)
    return allowed_ids(words)


def accepts(library: GrammarLibrary, matcher: Matcher, text: str) -> bool:
    ids = library.vocabulary.encode(text)
    num_accepted = 0
    for token_id in [*ids, EOS]:
        if not matcher.accept(token_id):
            break
        num_accepted += 1
    matcher.rollback(num_accepted)
    return num_accepted == len(ids) + 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "text", "allowed", "forbidden"),
    [
        (
            "choice",
            json.dumps(["red", 'say "hi"', "größe"]),
            ["red", 'say "hi"', "größe"],
            ["re", "reds", ""],
        ),
        ("regex", r"\d{3}-[a-c]+", ["123-abc"], ["12-a", "123-d", "123-"]),
        ("json_object", "", ["{}", '{"a": [1, null]}'], ["[]", "1", '{"a": }']),
        ("json", json.dumps(PERSON), ['{"name": "Ann", "age": 3}'], ['{"name": "Ann"}', '{"age": 1.5}']),
        ("grammar", 'root ::= "a" root "b" | "c"', ["c", "aacbb"], ["aacb", ""]),
        ("grammar", 'start: "a"* tail\ntail: "b" | "c"', ["ab", "aaac"], ["a", "bb"]),
    ],
)
def test_constraint_allows_its_texts_only(
    library: GrammarLibrary, backend: str, kind: str, text: str, allowed: list[str], forbidden: list[str]
) -> None:
    matcher = new_matcher(library, backend, kind, text)
    assert [each for each in allowed if not accepts(library, matcher, each)] == []
    assert [each for each in forbidden if accepts(library, matcher, each)] == []


@pytest.mark.parametrize(
    "pattern", [r"\w", r"\W", r"[^\w.]", r"[\W5]", r"\s", r"[^\s,]", r"[\s\S]", r"\\w|\d"]
)
def test_classes_of_a_regex_are_pythons(library: GrammarLibrary, pattern: str) -> None:
    """Letters, marks, digits, numbers, connectors, joiners, symbols and spaces of several scripts."""
    texts = [*"a_5-é中ß\u0301\u093e\u0345\u0663²½Ⅷ\u203f\u200dⒶ€ \u00a0\u2028\n\x1c\x85.,", r"\w"]
    matcher = new_matcher(library, GUIDANCE, "regex", pattern)
    allowed = [text for text in texts if accepts(library, matcher, text)]
    assert allowed == [text for text in texts if re.fullmatch(pattern, text)]


def test_classes_of_a_structural_tags_regex_are_pythons(library: GrammarLibrary) -> None:
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": r"\w+/\w"}}
    matcher = new_matcher(library, GUIDANCE, "structural_tag", json.dumps(tag))
    assert accepts(library, matcher, "é²/_")
    assert not accepts(library, matcher, "e\u0301/_")


ONE_TEXT = {"type": "object", "properties": {"a": {"type": "string"}}}


def test_mask_beyond_the_limits_fails_with_the_reason(
    library: GrammarLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = library.compile(GrammarSpec("json", json.dumps(ONE_TEXT)), GUIDANCE)
    few = llguidance.LLParserLimits(verbose_errors=False, step_max_items=1)
    monkeypatch.setattr(guidance_backend, "LIMITS", few)
    matcher = library.load(compiled).new_matcher()
    matcher.accept(mask(matcher)[0])
    for _ in range(2):
        with pytest.raises(MatcherFailed, match="Too many items"):
            mask(matcher)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_filled_together_equal_those_filled_alone(library: GrammarLibrary, backend: str) -> None:
    grammar = library.load(library.compile(GrammarSpec("json", json.dumps(PERSON)), backend))
    ids = library.vocabulary.encode('{"name": "Ann", "age": 3}')
    matchers = [grammar.new_matcher() for _ in range(5)]
    for num_tokens, matcher in zip([0, 1, 3, 4, len(ids)], matchers, strict=True):
        assert all(matcher.accept(token_id) for token_id in ids[:num_tokens])
    words = np.full((7, num_words(VOCAB_SIZE)), 77, dtype=np.int32)
    places = [5, 0, 2, 3, 6]
    type(matchers[0]).fill_masks(matchers, words, places)
    assert [allowed_ids(words[place]) for place in places] == [mask(matcher) for matcher in matchers]
    assert (words[[1, 4]] == 77).all()


def test_masks_filled_together_fail_if_one_is_beyond_the_limits(
    library: GrammarLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = library.compile(GrammarSpec("json", json.dumps(ONE_TEXT)), GUIDANCE)
    fine = library.load(compiled).new_matcher()
    monkeypatch.setattr(
        guidance_backend, "LIMITS", llguidance.LLParserLimits(verbose_errors=False, step_max_items=1)
    )
    failing = library.load(compiled).new_matcher()
    failing.accept(mask(failing)[0])
    with pytest.raises(MatcherFailed):
        type(fine).fill_masks([fine, failing], np.zeros((2, num_words(VOCAB_SIZE)), dtype=np.int32), [0, 1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rollback_restores_the_mask(library: GrammarLibrary, backend: str) -> None:
    matcher = new_matcher(library, backend, "json", json.dumps(PERSON))
    masks = []
    ids = [*library.vocabulary.encode('{"name": "Ann", "age": 3}'), EOS]
    for token_id in ids:
        masks.append(mask(matcher))
        assert matcher.accept(token_id)
    for before in reversed(masks):
        matcher.rollback(1)
        assert mask(matcher) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_copy_goes_on_and_back_on_its_own(library: GrammarLibrary, backend: str) -> None:
    matcher = new_matcher(library, backend, "choice", '["red", "reel"]')
    first, *rest = [*library.vocabulary.encode("r"), *library.vocabulary.encode("ed"), EOS]
    before = mask(matcher)
    assert matcher.accept(first)
    after = mask(matcher)
    copied = matcher.copy()
    assert all(copied.accept(token_id) for token_id in rest)
    assert mask(matcher) == after
    ended = copied.copy()
    copied.rollback(len(rest) + 1)
    assert mask(copied) == before
    ended.rollback(1)
    assert EOS in mask(ended)


@pytest.mark.parametrize("backend", BACKENDS)
def test_refused_token_leaves_the_state_unchanged(library: GrammarLibrary, backend: str) -> None:
    matcher = new_matcher(library, backend, "choice", '["red"]')
    before = mask(matcher)
    assert not matcher.accept(EOS)
    assert not matcher.accept(library.vocabulary.encode("blue")[0])
    assert mask(matcher) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_matchers_of_one_grammar_are_independent(library: GrammarLibrary, backend: str) -> None:
    grammar = library.load(library.compile(GrammarSpec("choice", '["red", "green"]'), backend))
    one, other = grammar.new_matcher(), grammar.new_matcher()
    before = mask(other)
    assert one.accept(library.vocabulary.encode("red")[0])
    assert mask(other) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_jump_forward_bytes_are_what_every_output_continues_with(
    library: GrammarLibrary, backend: str
) -> None:
    matcher = new_matcher(library, backend, "grammar", 'root ::= "abcdef" ("x" | "y")')
    assert matcher.jump_forward_bytes() == b"abcdef"
    for token_id in library.vocabulary.encode("abcdef"):
        assert matcher.accept(token_id)
    assert matcher.jump_forward_bytes() == b""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "text"), [("regex", "(a"), ("grammar", "root ::= other"), ("grammar", "start: ((")]
)
def test_invalid_constraint_is_refused(library: GrammarLibrary, backend: str, kind: str, text: str) -> None:
    with pytest.raises(UnsupportedConstraint):
        library.compile(GrammarSpec(kind, text), backend)


def test_special_tokens_are_never_text(library: GrammarLibrary) -> None:
    for backend in BACKENDS:
        assert EOS not in mask(new_matcher(library, backend, "regex", r"<\|endoftext\|>x"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_structural_tag_is_free_until_its_trigger(library: GrammarLibrary, backend: str) -> None:
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<f"],
            "tags": [
                {
                    "type": "tag",
                    "begin": "<f>",
                    "content": {"type": "json_schema", "json_schema": PERSON},
                    "end": "</f>",
                }
            ],
        },
    }
    matcher = new_matcher(library, backend, "structural_tag", json.dumps(tag))
    assert accepts(library, matcher, 'I say <f>{"name": "Ann", "age": 3}</f> and more.')
    assert accepts(library, matcher, "I say nothing.")
    assert not accepts(library, matcher, "I say <f>nothing</f>")


def test_structural_tag_with_a_schema_that_is_not_exact_is_refused(library: GrammarLibrary) -> None:
    schema = {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}
    with pytest.raises(UnsupportedConstraint, match="uniqueItems"):
        library.compile(GrammarSpec("structural_tag", json.dumps({"format": schema})))


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_whitespace_json_is_compact(library: GrammarLibrary, backend: str) -> None:
    spec = GrammarSpec("json", json.dumps(PERSON), disable_any_whitespace=True)
    grammar = library.load(library.compile(spec, backend))
    walks = [random_walk(grammar, library.vocabulary, seed) for seed in range(8)]
    finished = [walk.text.decode() for walk in walks if walk.is_finished]
    assert finished
    for text in finished:
        assert re.fullmatch(r'\{"name":".*", ?"age":-?\d+\}', text, re.DOTALL)


def test_grammar_of_another_version_is_a_value_error(library: GrammarLibrary) -> None:
    with pytest.raises(ValueError, match=r"."):
        library.load(b'x{"not": "a grammar"}')


@pytest.mark.parametrize("backend", BACKENDS)
def test_model_without_an_end_token_is_refused(library: GrammarLibrary, backend: str) -> None:
    path, vocab_size, _ = library._source
    endless = GrammarLibrary(path, vocab_size, ())
    endless.prepare(backend)
    with pytest.raises(UnsupportedConstraint, match="no end-of-sequence token"):
        endless.compile(GrammarSpec("regex", "a+"), backend)
    assert len(endless.vocabulary) == vocab_size
