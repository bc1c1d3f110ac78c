"""What ``serve.py`` consists of: OpenAI's forms, text of tokens, and models of transformers."""
