from tests.fuzz.run import main

main()
