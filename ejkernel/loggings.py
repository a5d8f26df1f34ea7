"""Loggers of the standard library that can also log a message only once."""

import logging
from typing import Any


class Logger(logging.LoggerAdapter):
    """A logger with `info_once`, `warning_once`, …: a message at most once in a process, with the same arguments."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._said: set[tuple[int, str]] = set()

    def log_once(self, level: int, message: object, *args: Any) -> None:
        """`log`, unless the message was logged at this level already."""
        text = str(message) % args if args else str(message)
        if (level, text) not in self._said:
            self._said.add((level, text))
            self.log(level, "%s", text)

    def debug_once(self, message: object, *args: Any) -> None:
        """`debug`, once."""
        self.log_once(logging.DEBUG, message, *args)

    def info_once(self, message: object, *args: Any) -> None:
        """`info`, once."""
        self.log_once(logging.INFO, message, *args)

    def warning_once(self, message: object, *args: Any) -> None:
        """`warning`, once."""
        self.log_once(logging.WARNING, message, *args)

    def error_once(self, message: object, *args: Any) -> None:
        """`error`, once."""
        self.log_once(logging.ERROR, message, *args)


def get_logger(name: str, level: int | None = None) -> Logger:
    """The logger of a name, at a level if one is given. It adds no handler: the application chooses what is shown."""
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level)
    return Logger(logger)
