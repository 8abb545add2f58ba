"""The other end of a raw TLS 1.3 socket, run as a script: it sends back whatever it gets.

It prints its port. A message is 8 bytes of length and as many bytes. It ends with the connection.

    python tls_echo.py certificate.pem key.pem
"""

from __future__ import annotations

import socket
import ssl
import sys


def main(certificate: str, key: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        plain, _ = listener.accept()
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with context.wrap_socket(plain, server_side=True) as connection:
        buffer = bytearray()
        length = bytearray(8)
        while received(connection, memoryview(length)):
            size = int.from_bytes(length, "little")
            if len(buffer) != size:
                buffer = bytearray(size)
            if not received(connection, memoryview(buffer)):
                return
            connection.sendall(buffer)


def received(connection: ssl.SSLSocket, place: memoryview) -> bool:
    """Fills `place`; False if the connection ended first."""
    while place:
        count = connection.recv_into(place)
        if not count:
            return False
        place = place[count:]
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
