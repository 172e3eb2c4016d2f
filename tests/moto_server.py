"""moto's DynamoDB and S3 behind one lock, as a program: `python moto_server.py PORT [ignore-conditions] [-- PROGRAM]`.

moto performs a conditional write in several steps, and two threads can interleave them: of 1,150 races for one row, two
had two winners. One lock around every request makes it atomic. With `ignore-conditions`, writes to S3 have none: as on
a server that does not know them. With a program, the server is there for that program, which finds it in its
environment; port 0 is a free one.
"""

import os
import subprocess
import sys
import threading

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class QuietHandler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: object) -> None:
        """Nobody reads it."""


def main(port: int, options: list[str], program: list[str]) -> int:
    app, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def one_at_a_time(environ, start_response):
        if "ignore-conditions" in options:
            for name in ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"):
                environ.pop(name, None)
        with lock:
            return list(app(environ, start_response))

    server = make_server("127.0.0.1", port, one_at_a_time, threaded=True, request_handler=QuietHandler)
    if not program:
        server.serve_forever()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    environment = {**os.environ, "AWS_ENDPOINT_URL_DYNAMODB": url, "AWS_ENDPOINT_URL_S3": url}
    return subprocess.run(program, env=environment, check=False).returncode


if __name__ == "__main__":
    given = sys.argv[1:]
    place = given.index("--") if "--" in given else len(given)
    sys.exit(main(int(given[0]), given[1:place], given[place + 1 :]))
