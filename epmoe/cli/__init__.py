"""The `epmoe` command. Beside the path of a token: it looks at the machine, tries every path, and measures."""
