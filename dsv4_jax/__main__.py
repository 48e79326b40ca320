"""`python -m dsv4_jax demo | doctor`."""

import argparse
import sys

import dsv4_jax


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["bench"]:
        print("The benchmarks are not installed; in a clone of the repository, run: python -m bench", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="python -m dsv4_jax", description="DeepSeek-V4's KV compressor for JAX.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {dsv4_jax.__version__}")
    commands = parser.add_subparsers(dest="command")
    demo = commands.add_parser(
        "demo",
        help="run a text through all compressors and check every stored byte",
        description="Takes a text through the CSA, HCA and indexer compressors - chunked prefill, then decode, in "
        "paged caches - and checks every stored byte against float64. Exit code: "
        "0 all right, 1 a check failed, 2 bad input.",
    )
    demo.add_argument("text", nargs="?", metavar="TEXT", help="a UTF-8 text file; the default comes with the package")
    demo.add_argument("--checkpoint", metavar="DIR", help="take the compressors' weights from safetensors files here")
    demo.add_argument("--layer", type=_at_least(0), metavar="L", default=0,
                      help="with --checkpoint: the first CSA and HCA layers from L on (default 0)")  # fmt: skip
    demo.add_argument("--implementation", choices=("xla", "triton", "cutedsl"), help="default: the platform switch")
    demo.add_argument("--output", metavar="PNG", default="demo.png", help="the picture (default %(default)s)")
    demo.add_argument("--tokens", type=_at_least(1), metavar="N", default=2048,
                      help="read at most N tokens, which are bytes (default %(default)s)")  # fmt: skip
    commands.add_parser("doctor", help="say what can run here and what is missing")

    options = vars(parser.parse_args(argv))
    command = options.pop("command")
    if command is None:
        parser.print_help()
        return 2
    if command == "doctor":
        from dsv4_jax.doctor import main as doctor

        return doctor()
    from dsv4_jax.demo.run import main as run_demo

    return run_demo(**options)


def _at_least(least):
    def integer(text):
        if (value := int(text)) < least:
            raise ValueError
        return value

    integer.__name__ = f"integer of at least {least}"  # argparse's error says it
    return integer


if __name__ == "__main__":
    sys.exit(main())
