"""Networks of the field at small sizes, and the page that says how each of them does when its input is sharded."""
