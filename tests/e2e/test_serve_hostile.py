"""Requests that nobody would send: whatever comes in, the server replies and lives on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from support.served_models import serving, trained

SCHEMA: dict[str, Any] = {
    "openapi": "3.0.2",
    "info": {"title": "shoal serve", "version": "1"},
    "paths": {
        "/v1/models/{model}:predict": {
            "post": {
                "parameters": [
                    {
                        "name": "model",
                        "in": "path",
                        "required": True,
                        "schema": {"type": "string", "enum": ["tiny", "other"]},
                    }
                ],
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/json": {
                            "schema": {
                                "type": "object",
                                "properties": {
                                    "signature_name": {"type": "string"},
                                    "instances": {"type": "array", "items": {}},
                                    "inputs": {},
                                },
                            }
                        }
                    },
                },
                "responses": {"200": {"description": ""}, "default": {"description": ""}},
            }
        },
        "/v2/models/{model}/infer": {
            "post": {
                "parameters": [
                    {
                        "name": "model",
                        "in": "path",
                        "required": True,
                        "schema": {"type": "string", "enum": ["tiny", "other"]},
                    }
                ],
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/json": {
                            "schema": {
                                "type": "object",
                                "required": ["inputs"],
                                "properties": {
                                    "id": {"type": "string"},
                                    "inputs": {
                                        "type": "array",
                                        "items": {
                                            "type": "object",
                                            "required": ["name", "datatype", "shape", "data"],
                                            "properties": {
                                                "name": {"type": "string"},
                                                "datatype": {"enum": ["INT64", "FP32", "BYTES"]},
                                                "shape": {
                                                    "type": "array",
                                                    "items": {"type": "integer"},
                                                },
                                                "data": {"type": "array", "items": {}},
                                            },
                                        },
                                    },
                                },
                            }
                        }
                    },
                },
                "responses": {"200": {"description": ""}, "default": {"description": ""}},
            }
        },
    },
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_requests_of_a_schema_have_a_code(tmp_path: Path) -> None:
    import schemathesis
    from hypothesis import HealthCheck, given, settings

    run = trained(tmp_path)
    with serving(run) as (server, _):
        url = f"http://{server.http_address}"
        schema = schemathesis.openapi.from_dict(SCHEMA)
        for operation in schema.get_all_operations():
            strategy = operation.ok().as_strategy()

            @given(case=strategy)
            @settings(
                max_examples=15,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                derandomize=True,
                database=None,
            )
            def ask(case: Any) -> None:
                reply = case.call(base_url=url, timeout=60)
                assert reply.status_code in (200, 400, 404, 405)

            ask()
        assert httpx.get(f"{url}/healthz", timeout=60).text == "ok"
