"""The command line: one file per command."""

import signal


def main() -> int:
    """The program `anabranch`. While its modules are imported, Ctrl-C ends the process silently."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from anabranch._cli.command_line import run_program

    return run_program(handler)
