"""Rules that are built into Bazel before 7, under the names from which newer ones load theirs."""

def _built_in_rules(context):
    context.file(context.attr.package + "/BUILD.bazel")
    lines = ["{0} = native.{0}\n".format(rule) for rule in context.attr.rules]
    context.file(context.attr.package + "/defs.bzl", "".join(lines))

built_in_rules = repository_rule(
    _built_in_rules,
    attrs = {
        "package": attr.string(doc = "the package in which a newer Bazel finds the rules"),
        "rules": attr.string_list(),
    },
)
