"""Prints how many calls were searched."""


def pytest_terminal_summary(terminalreporter):
    reports = [report for of in terminalreporter.stats.values() for report in of if hasattr(report, "user_properties")]
    lines = sorted({text for report in reports for name, text in report.user_properties if name == "fuzz"})
    if lines:
        terminalreporter.section("random calls")
        terminalreporter.write("\n".join(lines) + "\n")
