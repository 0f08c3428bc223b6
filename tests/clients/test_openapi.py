"""schemathesis, which makes requests from the OpenAPI document and checks the responses against it."""

from __future__ import annotations

from local_server import ThreadedServer

from tests.clients.conftest import RunProgram


def test_responses_are_those_of_the_openapi_document(server: ThreadedServer, run_program: RunProgram) -> None:
    """No request, valid or not, has a response that the document does not describe, or a status of 500."""
    output = run_program(
        "schemathesis", "schemathesis", "run", f"{server.url}/openapi.json", "--checks", "all",
        "--max-examples", "30", "--seed", "1", "--no-color",
    )  # fmt: skip
    assert "No issues found" in output, output
