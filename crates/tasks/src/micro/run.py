import sys

sys.dont_write_bytecode = True


def main():
    from examples import CASES

    bad = 0
    for module, name, args, want in CASES:
        try:
            got = repr(getattr(__import__(module), name)(*args))
        except BaseException as error:
            got = type(error).__name__
        if got != repr(want):
            bad = 1
            print(f"FAILED {name}: got {got}, expected {want!r}")
    if not bad:
        print("ok")
    return bad


sys.exit(main())
