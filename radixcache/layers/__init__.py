"""All layers of a model as one: their state cut, joined and copied, or its sizes alone."""
