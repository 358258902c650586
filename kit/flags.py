"""
flags.py: a dataclass becomes a command line.

Concept     A dataclass becomes a command line.
Paper       nothing
In          
Out         
Left out    
Read next   
"""

from dataclasses import field


def knob(default, source: str, help: str, choices: tuple = ()):
    """A field of Config. source of its default: the paper, notes by others on it, verl (RL
    library), Thyme (SFT) or us."""
    text = f"{help} [{source}: {default}]".replace("%", "%%")  # argparse formats it
    return field(default=default, metadata={"help": text, "choices": choices})


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
