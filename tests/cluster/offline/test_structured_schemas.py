"""Finished answers of the demo model are valid by each public schema that is accepted; others name their keyword."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from json_schemas import FILES, is_checked_exactly, records, validator

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.proto.errors import InvalidRequest

MIN_FINISHED = {"json_schema_test_suite": 20, "schemastore": 1}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="cpu", num_kv_blocks=1024, block_size=16) as opened:
        yield opened


def keywords_of(schema: Any) -> Iterator[str]:
    """Yield the names in a schema, at any depth, and its values that are schemas without names."""
    if isinstance(schema, Mapping):
        for name, value in schema.items():
            yield name.lstrip("$")
            yield from keywords_of(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from keywords_of(value)
    elif isinstance(schema, bool | str):
        yield json.dumps(schema).strip('"')


def sampling(schema: Any, seed: int) -> SamplingParams:
    form = StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=True)
    return SamplingParams(max_tokens=120, temperature=1.0, seed=seed, structured_outputs=form)


@pytest.mark.parametrize("name", FILES)
def test_finished_answers_are_valid_by_every_accepted_schema(llm: LLM, name: str) -> None:
    accepted, params = [], []
    for seed, record in enumerate(records(name)):
        own = sampling(record["schema"], seed)
        try:
            llm._loaded.checker.check([5, 6, 7], own)
        except InvalidRequest as error:
            found = str(error)
            assert any(word and word in found for word in keywords_of(record["schema"])), (
                record["id"],
                found,
            )
            continue
        if is_checked_exactly(record["schema"]):
            accepted.append(record)
            params.append(own)
    outputs = llm.generate(["It was"] * len(params), params)
    num_finished = 0
    for record, output in zip(accepted, outputs, strict=True):
        completion = output.outputs[0]
        if completion.finish_reason == "stop":
            num_finished += 1
            assert validator(record).is_valid(json.loads(completion.text)), (record["id"], completion.text)
    assert num_finished >= MIN_FINISHED[name]
