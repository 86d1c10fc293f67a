"""Addresses that the HTTP servers listen on.  Errors name the flags --host and --port."""
from __future__ import annotations

import errno
import socket
from typing import Any

from pyops.errors import UserError, printable


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Return the family and the address of a host of this machine.   UserError if it is unknown"""
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UserError(f'--host {printable(host)}: unknown address; give one of this machine, such as 127.0.0.1') from error
    return family, address


def cannot_listen(host: str, port: int, error: OSError) -> UserError:
    """Return the UserError for an error of bind() or listen()."""
    if error.errno == errno.EADDRINUSE:
        return UserError(f'--port {port}: already in use by another program; stop it, or give --port 0 for any free port')
    if error.errno == errno.EACCES:
        return UserError(f'--port {port}: permission denied; give a port above 1023, or --port 0 for any free port')
    return UserError(f'--host {printable(host)}: cannot listen there ({error.strerror}); give an address of this machine, '
                     'such as 127.0.0.1')


def listen(host: str, port: int, backlog: int = 128) -> socket.socket:
    """Return a TCP socket that listens.  port 0: any free port.   UserError if the host or the port cannot be used"""
    family, address = resolve(host, port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)      # a restart need not wait for old connections
        listener.bind(address)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error) from error
    return listener


def url_of(address: tuple[Any, ...]) -> str:
    """Return the URL of a socket's address (host, port, ...)."""
    host, port = address[:2]
    return f'http://{f"[{host}]" if ":" in host else host}:{port}'
