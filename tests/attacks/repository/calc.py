def total(items):
    return sum(items)


def largest(items):
    return max(items)


def double(n):
    return n * 2
