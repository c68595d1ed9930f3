"""The HTTP port: REST of TF-Serving and Open Inference v2, metrics, health, and a status page."""

from __future__ import annotations

import asyncio
import html
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from shoal.errors import ShoalError, UnknownName
from shoal.serve.openinference import OpenInference, object_of_json, version_of
from shoal.serve.service import HTTP_STATUS, Code, Service
from shoal.serve.tensors import refused
from shoal.serve.tfserving import TfServing

_TF = re.compile(r"/v1/models/([^/]+?)(?:/versions/([^/:]+))?(:predict|/metadata|)")
_OIP = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?(/infer|/ready|)")
_JSON_SIZE = "inference-header-content-length"
_TF_NAME, _OIP_NAME = "tfserving-rest", "openinference-rest"

Answer = Callable[[Request], Awaitable[Response]]


def make_app(service: Service, version: str) -> Starlette:
    """The ASGI application."""
    tf, oip = TfServing(service), OpenInference(service, version)

    async def tfserving(request: Request) -> Response:
        return await _tfserving(service, tf, request)

    async def models(request: Request) -> Response:
        return await _openinference(service, oip, request)

    async def server(request: Request) -> Response:
        return JSONResponse(oip.server_metadata())

    async def live(request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(request: Request) -> Response:
        is_ready = service.models.ready
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    async def healthz(request: Request) -> Response:
        is_ready = service.models.ready
        return PlainTextResponse("ok" if is_ready else "loading", 200 if is_ready else 503)

    async def metrics(request: Request) -> Response:
        service.collect()
        return Response(generate_latest(service.registry), media_type=CONTENT_TYPE_LATEST)

    async def page(request: Request) -> Response:
        return HTMLResponse(status_page(service, version))

    return Starlette(
        routes=[
            Route("/v1/models/{rest:path}", _guarded(service, tfserving), methods=["GET", "POST"]),
            Route("/v2", _guarded(service, server)),
            Route("/v2/health/live", live),
            Route("/v2/health/ready", ready),
            Route("/v2/models/{rest:path}", _guarded(service, models), methods=["GET", "POST"]),
            Route("/healthz", healthz),
            Route("/metrics", _guarded(service, metrics)),
            Route("/", _guarded(service, page)),
        ]
    )


def _guarded(service: Service, answer: Answer) -> Answer:
    async def guarded(request: Request) -> Response:
        if service.allows(request.headers.get("authorization")):
            return await answer(request)
        message = "Authorization: Bearer TOKEN is missing, or of another token"
        return _error(Code.UNAUTHENTICATED, message, {"www-authenticate": "Bearer"})

    return guarded


async def _tfserving(service: Service, tf: TfServing, request: Request) -> Response:
    match = _TF.fullmatch(request.url.path)
    posts = match is not None and match[3] == ":predict"
    if match is not None and posts != (request.method == "POST"):
        return _wrong_method("POST" if posts else "GET")

    def call(body: bytes) -> tuple[str, Any]:
        name, version, method = _place(_TF, request)
        if method == ":predict":
            service.admit()
            with service.decoding(len(body)):
                wanted = object_of_json(body)
            return tf.rest_predict(name, version, wanted, len(body))
        if method == "/metadata":
            return tf.rest_metadata(name, version)
        return tf.rest_status(name, version)

    code, reply = await _called(service, _TF_NAME, request, call, posts=posts)
    return JSONResponse(reply) if code is Code.OK else _error(code, reply)


async def _openinference(service: Service, oip: OpenInference, request: Request) -> Response:
    match = _OIP.fullmatch(request.url.path)
    posts = match is not None and match[3] == "/infer"
    if match is not None and posts != (request.method == "POST"):
        return _wrong_method("POST" if posts else "GET")

    def call(body: bytes) -> tuple[str, Any]:
        name, version, method = _place(_OIP, request)
        if method == "/ready":
            return name, oip.model_ready(name, version)
        if not method:
            return name, oip.model_metadata(name, version)
        size = request.headers.get(_JSON_SIZE)
        if size is not None and not (size.isascii() and size.isdigit() and len(size) < 12):
            raise refused(_JSON_SIZE, repr(size)[:40], "a number", "Count the JSON.")
        return oip.rest_infer(name, version, body, None if size is None else int(size))

    code, reply = await _called(service, _OIP_NAME, request, call, posts=posts)
    if code is not Code.OK:
        return _error(code, reply)
    if isinstance(reply, bool):
        return JSONResponse({"ready": reply}, 200 if reply else 503)
    if isinstance(reply, dict):
        return JSONResponse(reply)
    data, size = reply
    if size is None:
        return Response(data, media_type="application/json")
    headers = {_JSON_SIZE: str(size)}
    return Response(data, media_type="application/octet-stream", headers=headers)


async def _called(
    service: Service,
    protocol: str,
    request: Request,
    call: Callable[[bytes], tuple[str, Any]],
    *,
    posts: bool,
) -> tuple[Code, Any]:
    """A call with the body of its request, on threads, so that others are heard meanwhile."""
    parts: list[bytes] = []
    wrong: ShoalError | None = None
    held = 0
    try:
        if posts:
            try:
                async for part in _body(service, request):
                    service.hold(len(part))
                    held += len(part)
                    parts.append(part)
            except ShoalError as error:
                wrong = error

        def run() -> tuple[str, Any]:
            if wrong is not None:
                raise wrong
            return call(b"".join(parts))

        threads = service.threads if posts else service.short_threads
        loop = asyncio.get_running_loop()
        left = loop.create_task(_left(request))
        try:
            there = partial(_waits, left)
            return await loop.run_in_executor(threads, service.timed, protocol, run, there)
        finally:
            left.cancel()
    finally:
        service.let_go(held)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _waits(left: asyncio.Task[None]) -> bool:
    return not left.done()


def _place(pattern: re.Pattern[str], request: Request) -> tuple[str, int | None, str]:
    match = pattern.fullmatch(request.url.path)
    if match is None:
        raise UnknownName(
            "unknown model or method",
            got=request.url.path[:80],
            allowed="/v1/models/NAME[/versions/N][:predict|/metadata], /v2/models/NAME[...]",
            remedy="Check the path.",
        )
    return match[1], version_of(match[2] or ""), match[3]


async def _body(service: Service, request: Request) -> AsyncIterator[bytes]:
    """The parts of a request's body.

    Raises:
        DataError: it is too long, encoded, or ends early.
    """
    most, size = service.limits.most_bytes, 0
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise refused("content-encoding", encoding[:40], "identity", "Send it as it is.")
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise refused("body", "more bytes", f"at most {most}", "Send several requests.")
            yield part
    except ClientDisconnect:
        raise refused("body", "the client left", "a whole body", "Send it again.") from None


def _error(code: Code, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, HTTP_STATUS[code], headers)


def _wrong_method(allowed: str) -> Response:
    return JSONResponse({"error": f"this is asked by {allowed}"}, 405, {"allow": allowed})


_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { margin: 2em auto; max-width: 60em; padding: 0 1em; }
div { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3em 1em .3em 0;
  border-bottom: 1px solid #8884; white-space: nowrap; }
td.text { white-space: normal; min-width: 16em; overflow-wrap: anywhere; }
th { font-weight: 500; opacity: .7; }
""".strip()


def status_page(service: Service, version: str) -> str:
    """Versions, staleness and rates of all models, as one HTML page that asks for itself again."""
    models = []
    for name in service.models.names:
        staleness_s = service.models.staleness_s(name)
        for one in service.models.states(name):
            served = one.state == "AVAILABLE" and staleness_s is not None
            number = "" if one.state == "START" else str(one.version)
            age = f"{staleness_s:.2f} s" if served else ""
            models.append((name, number, one.state, age, one.error))
    rates = []
    uptime_s = max(time.time() - service.started_s, 1e-9)
    for model, protocol, count, seconds in service.totals():
        mean = f"{1000 * seconds / count:.2f} ms" if count else ""
        rate = f"{count / uptime_s:,.1f}"
        rates.append((model or "(unknown)", protocol, f"{count:,.0f}", rate, mean))
    heads = (
        ("model", "version", "state", "staleness", "problem"),
        ("model", "protocol", "requests", "requests/s since the start", "mean time"),
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Shoal</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="5"><style>{_STYLE}</style></head><body>
<h1>Shoal {html.escape(version)}</h1>
<h2>Models</h2>
{_table(heads[0], models)}
<h2>Requests</h2>
{_table(heads[1], rates)}
</body></html>
"""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heads = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = [f"<tr>{heads}</tr>"]
    for row in rows:
        *short, last = (html.escape(cell) for cell in row)
        cells = "".join(f"<td>{cell}</td>" for cell in short)
        lines.append(f'<tr>{cells}<td class="text">{last}</td></tr>')
    return f"<div><table>{''.join(lines)}</table></div>"
