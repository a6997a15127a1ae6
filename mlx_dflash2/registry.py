def default_drafter(model):
    raise ValueError("no known drafter")


def mismatch_note(model, drafter):
    return None
