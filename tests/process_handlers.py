"""Handlers that tests run in other processes, in a module that is loaded quickly there."""

import importlib
import os
import sys
import threading
import time


class InModule:
    """A handler that another process gets by importing its module, which this one need not do."""

    def __init__(self, module):
        self._module = module

    def __reduce__(self):
        return _handler_of, (self._module,)

    def __call__(self, record):
        raise AssertionError("it is called in another process")


def _handler_of(module):
    return importlib.import_module(module).handle


def exit_or_return_a_lock(record):
    if record.data == b"0":
        sys.exit("enough")
    return threading.Lock()


def wait_for_file(record):
    while not os.path.exists(record.data):  # noqa: PTH110 -- runs in a process of its own
        time.sleep(0.01)


def process_id_of(record):
    with open(record.data.decode(), "a") as file:  # noqa: PTH123 -- runs in a process of its own
        file.write(f"{os.getpid()}\n")


def die_or_write(record):
    path, _, number = record.data.decode().partition(" ")
    if number == "1":
        os._exit(1)
    with open(path, "a") as file:  # noqa: PTH123 -- runs in a process of its own
        file.write(number)


def failing(record):
    raise LookupError(f"no customer {record.partition_key}")
