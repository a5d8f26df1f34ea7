"""An engine's limits, and whether all its pages are free."""

LIMITS = dict(pages=64, page_size=8, sequences=4, length=64, buckets=(8, 16))


def all_is_free(engine):
    pool = engine.scheduler.pool
    return engine.idle and pool.used == 0 and set(pool.references) == {0}
