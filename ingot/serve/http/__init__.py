"""The HTTP server: OpenAI's API over `AsyncLLM`, with FastAPI and uvicorn. It imports no torch."""
