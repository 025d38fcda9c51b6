"""What every entry point shares: flags, help, gin, multi-host start, and errors told in one sentence.

An entry point is thin:

    def main(run_dir: Path) -> None: ...

    if __name__ == "__main__":
        cli.run(main, run_dir=True)
"""

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import app, flags, logging

from cipo_jax import config
from cipo_jax.distributed import start
from cipo_jax.errors import UserError

# Set before transformers is first imported: it would announce that it found no torch, which is not needed.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

FLAGS = flags.FLAGS
USER_ERROR = 2  # exit code
INTERRUPTED = 130  # exit code, as a shell gives for SIGINT

flags.DEFINE_multi_string("gin_file", [], "Configuration to read; repeat it to add files, a later one wins.")
flags.DEFINE_multi_string("gin_binding", [], "One setting, as 'name = value'; repeat it. Wins over the files.")
flags.DEFINE_string("gin_names", None, "List the settings of everything whose name holds this text ('' = all); exit.")
flags.DEFINE_bool("traceback", False, "Show the Python traceback of a user's error too.")

operative_config = config.operative_config


def run(
    main: Callable[..., int | None],
    *,
    run_dir: bool = False,
    doc: str | None = None,
    argv: Sequence[str] | None = None,
) -> None:
    """Parses the command line, starts JAX's processes, parses gin, calls `main` and exits.

    Args:
      main: Called as `main(run_dir)` with a `pathlib.Path` when `run_dir`, else as `main()`; returns the exit code or
        None for 0.
      run_dir: Whether the program needs `--run_dir`.
      doc: Text of `--help`; the docstring of `main`'s module when None.
      argv: The command line, `sys.argv` when None.

    Raises:
      SystemExit: Always. 0 or what `main` returned; 2 for an error that is the user's to mend, told on stderr without
        a traceback; 130 after Ctrl-C. Other exceptions leave with their traceback.
    """
    if run_dir and "run_dir" not in FLAGS:
        flags.DEFINE_string("run_dir", None, "Directory of this run; a run found there is continued.")
    doc = doc if doc is not None else sys.modules[main.__module__].__doc__
    argv = list(sys.argv if argv is None else argv)
    app.run(
        lambda _: start.leave_on_failure(lambda: _guarded(main, run_dir)),
        argv=argv,
        flags_parser=lambda args: _parse_flags(args, doc or "", main.__module__),
    )


def _parse_flags(argv: list[str], doc: str, module: str) -> list[str]:
    if {"-h", "-help", "--help"} & set(argv):
        print(help_text(doc, module))
        sys.exit(0)
    try:
        rest = FLAGS(argv)
    except flags.Error as error:
        _say(f"{error}; --help shows the flags.".replace(".;", ";"))
        sys.exit(USER_ERROR)
    if len(rest) > 1:
        _say(
            f"Unexpected argument {rest[1]!r}; settings are passed as --gin_file=FILE or --gin_binding='name = value'."
        )
        sys.exit(USER_ERROR)
    return rest


def help_text(doc: str, module: str) -> str:
    """The entry point's docstring followed by its flags with their defaults."""
    lines = [doc.strip(), "", "Flags:"]
    for owner, defined in sorted(FLAGS.flags_by_module_dict().items(), key=lambda item: item[0] != __name__):
        if owner not in (__name__, module, "__main__", sys.argv[0]):
            continue
        for flag in defined:
            shown = f"--{flag.name}" if flag.boolean else f"--{flag.name}={flag.name.rsplit('_', 1)[-1].upper()}"
            text = flag.help.split(";\n")[0].rstrip(";")
            default = "" if flag.default in (None, False, []) else f" (default: {flag.default})"
            lines.append(f"  {shown:<24} {text}{default}")
    return "\n".join(lines)


def _guarded(main: Callable[..., int | None], needs_run_dir: bool) -> int:
    where = None
    if not FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # libraries announce themselves at INFO
    try:
        if FLAGS.gin_names is not None:
            config.import_configurables()
            with contextlib.suppress(BrokenPipeError):  # `| head`
                print(config.describe(FLAGS.gin_names), flush=True)
            return 0
        if needs_run_dir:
            if not FLAGS.run_dir:
                raise UserError("--run_dir is not set; name the directory that this run shall write to.")
            where = Path(FLAGS.run_dir)
        start.initialise()  # before anything touches a device
        config.parse(FLAGS.gin_file, FLAGS.gin_binding)
        return (main(where) if needs_run_dir else main()) or 0
    except KeyboardInterrupt:
        _say("Interrupted.")
        return INTERRUPTED
    except OSError as outer:
        error = config.original(outer)
        if not _is_about(where, error):
            raise
        _tell(UserError(f"Cannot write {error.filename or where}: {error.strerror}; choose another --run_dir."))
        return USER_ERROR
    except Exception as error:
        told = config.as_user_error(error)
        if told is None:
            raise
        _tell(told)
        return USER_ERROR


def _is_about(where: Path | None, error: OSError) -> bool:
    if where is None:
        return False
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return True
    return error.filename is not None and Path(str(error.filename)).absolute().is_relative_to(where.absolute())


def _tell(error: UserError) -> None:
    if FLAGS.traceback:
        traceback.print_exc()
    _say(str(error))


def _say(text: str) -> None:
    print(f"error: {text}" if not text.startswith("Interrupted") else text, file=sys.stderr, flush=True)
