def near(a, b):
    return a == b
