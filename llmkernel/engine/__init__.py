"""The engine process: core_proc > core > executor > worker, scheduler > kv_cache > request."""
