"""The kernel's half of the live views; the browser's half is extension/."""
