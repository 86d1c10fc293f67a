"""The pictures of pyops.inspect.draw: their numbers (numbers.py), their look (style.py), and one module a kind."""
