"""What a user holds: LLM, LLMEngine, AsyncLLM, and the text work between tokens and answers."""
