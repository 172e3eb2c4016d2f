"""moto's DynamoDB and S3 behind one lock, as a program: `python moto_server.py PORT [ignore-conditions]`.

moto performs a conditional write in several steps, and two threads can interleave them: of 1,150 races for one row, two
had two winners. One lock around every request makes it atomic. With `ignore-conditions`, writes to S3 have none: as on
a server that does not know them.
"""

import sys
import threading

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class QuietHandler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: object) -> None:
        """Nobody reads it."""


def main(port: int, *options: str) -> None:
    app, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def one_at_a_time(environ, start_response):
        if "ignore-conditions" in options:
            for name in ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"):
                environ.pop(name, None)
        with lock:
            return list(app(environ, start_response))

    make_server("127.0.0.1", port, one_at_a_time, threaded=True, request_handler=QuietHandler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
