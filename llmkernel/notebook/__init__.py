"""The notebook face: magics, the Generation handle, displays."""
