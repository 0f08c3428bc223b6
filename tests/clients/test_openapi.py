"""schemathesis, which makes requests from the OpenAPI document and checks the responses against it."""

from __future__ import annotations

from local_server import ThreadedServer

from tests.clients.conftest import RunProgram


def test_responses_are_those_of_the_openapi_document(server: ThreadedServer, run_program: RunProgram) -> None:
    """No request, valid or not, has a response that the document does not describe, or a status of 500.

    Two checks are left out. The document does not describe everything that is refused, since SamplingParams checks
    values; and values of similar types are accepted, as vLLM does.
    """
    output = run_program(
        "schemathesis", "schemathesis", "run", f"{server.url}/openapi.json", "--checks", "all",
        "--exclude-checks", "positive_data_acceptance,negative_data_rejection",
        "--max-examples", "10", "--seed", "1", "--no-color",
    )  # fmt: skip
    assert "Tested: 16" in output, output
