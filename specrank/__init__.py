"""The `specrank` command and its demo."""
