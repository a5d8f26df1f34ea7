def scalar_bytes(*a):
    return 0
