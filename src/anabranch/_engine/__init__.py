"""The asyncio shell: loops that call the core and perform the steps that it returns. It decides nothing."""
