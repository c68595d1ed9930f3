"""A process's ports: gRPC, and HTTP on an event loop in a thread of its own."""

from __future__ import annotations

import socket
import ssl
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.errors import ConfigError
from shoal.serve.grpc_server import make_server
from shoal.serve.http_server import make_app
from shoal.serve.packages import grpc, uvicorn
from shoal.serve.service import Service

_GRACE_S = 5.0
_SWITCH_S = 0.0005  # threads of calls wait no longer for the one that computes


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of a certificate chain and its private key, PEM."""

    certificate: str
    key: str


class ModelServer:
    """Serves a service until its end.

    Args:
        service: what is served.
        grpc_address: HOST:PORT; port 0 takes a free one. None: no gRPC.
        http_address: the same of HTTP.
        tls: None: plain text.
        version: of Shoal, which metadata has.

    Attributes:
        grpc_address, http_address: with the ports that were taken; "" of none.

    Raises:
        ConfigError: an address that is taken or none, or files that are no certificate.
    """

    def __init__(
        self,
        service: Service,
        *,
        grpc_address: str | None = "127.0.0.1:0",
        http_address: str | None = "127.0.0.1:0",
        tls: Tls | None = None,
        version: str = "",
    ) -> None:
        self._service, self._tls, self._version = service, tls, version
        self._wanted_grpc, self._wanted_http = grpc_address, http_address
        self.grpc_address = self.http_address = ""
        self._stops = ExitStack()

    def __enter__(self) -> ModelServer:
        _check(self._tls)
        with ExitStack() as stops:
            stops.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(_SWITCH_S)
            # Of the whole process: callers compute, as many at once as there are cores.
            stops.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
            stops.enter_context(self._service)
            if self._wanted_grpc is not None:
                self._start_grpc(self._wanted_grpc, stops)
            if self._wanted_http is not None:
                self._start_http(self._wanted_http, stops)
            self._stops = stops.pop_all()
        return self

    def __exit__(self, *of: object) -> None:
        self._stops.close()

    def _start_grpc(self, address: str, stops: ExitStack) -> None:
        server = make_server(self._service, self._version)
        stops.callback(lambda: server.stop(_GRACE_S).wait())
        host, _ = _split(address)
        try:
            if self._tls is None:
                port = server.add_insecure_port(address)
            else:
                pair = Path(self._tls.key).read_bytes(), Path(self._tls.certificate).read_bytes()
                port = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            raise _taken(address, error) from error
        server.start()
        self.grpc_address = f"{host}:{port}"

    def _start_http(self, address: str, stops: ExitStack) -> None:
        host, number = _split(address)
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        stops.callback(listening.close)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host.strip("[]"), number))
            listening.listen()
        except OSError as error:
            raise _taken(address, error) from error
        config = uvicorn.Config(
            make_app(self._service, self._version),
            log_level="warning",
            limit_concurrency=self._service.limits.most_calls,
            access_log=False,
            lifespan="off",
            ssl_certfile=None if self._tls is None else self._tls.certificate,
            ssl_keyfile=None if self._tls is None else self._tls.key,
            timeout_graceful_shutdown=int(_GRACE_S),
        )
        config.load()
        server = uvicorn.Server(config)
        thread = threading.Thread(
            target=server.run, args=([listening],), name="shoal http", daemon=True
        )
        thread.start()

        def stop() -> None:
            server.should_exit = True
            thread.join()

        stops.callback(stop)
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        if not server.started:
            raise _taken(address, "it did not start")
        self.http_address = f"{host}:{listening.getsockname()[1]}"


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise _taken(address, "no address")
    return host, int(port)


def _taken(address: str, error: object) -> ConfigError:
    return ConfigError(
        "address of a server",
        got=f"{address} ({error})",
        allowed="HOST:PORT of this machine that is free",
        remedy="Choose another; port 0 takes a free one.",
    )


def _check(tls: Tls | None) -> None:
    """Refuse files that are no certificate and its key, before a port is named in their place."""
    if tls is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.certificate, tls.key)
    except OSError as error:  # SSLError is one
        allowed, remedy = "PEM files of a certificate and its key", "Check the files."
        raise ConfigError("files of TLS", f"{tls} ({error})", allowed, remedy) from error
