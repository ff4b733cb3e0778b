"""How responses and their prompts are arranged into rows of tokens: `padded`, `packed`, `shared_prefix`."""
