"""The tests of other attention libraries, from copies that the user has, run on archflash."""
