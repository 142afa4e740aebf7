"""Payloads, which hold rows as bytes: their layout, and the code that packs and gathers rows into them."""
